"""A hook of mkdocs.yml that generates the configuration reference from configs/ when the documentation is built."""

import html
from collections.abc import Iterator
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parents[2] / "configs"


def on_page_markdown(markdown, page, config, files):
    """Append the reference to docs/configuration.md; mkdocs calls this."""
    return f"{markdown}\n{reference()}" if page.file.src_uri == "configuration.md" else markdown


def reference() -> str:
    """Return every file of configs/ with its keys, in Markdown."""
    parts = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        parts += [f"## {path.name}\n", _file(path, prefix="")]
    for group in sorted(folder for folder in CONFIGS.iterdir() if folder.is_dir()):
        parts.append(f"## {group.name}\n")
        for path in sorted(group.glob("*.yaml")):
            parts += [f"### {group.name}={path.stem}\n", _file(path, prefix=f"{group.name}.")]
    return "\n".join(parts)


def _file(path: Path, prefix: str) -> str:
    """Return the comment at the top of a file, and a table of its keys as they are written on a command line."""
    lines = path.read_text().splitlines()
    if lines[0].startswith("# @package _global_"):
        lines, prefix = ["", *lines[1:]], ""  # the empty line keeps the line numbers of `node` valid
    comment = [line.removeprefix("#").removeprefix(" ") for line in lines[: _first_code(lines)]]
    node = yaml.compose("\n".join(lines))
    rows = [
        f"| `{prefix}{key}` | `{value}` | {html.escape(meaning, quote=False).replace('|', '&#124;')} |"
        for key, value, meaning in _keys(node, lines)
    ]
    table = ["| key | value | meaning |", "|---|---|---|", *rows] if rows else []
    options = ", ".join(f"`{option}`" for option in _defaults(node, path.parent.name))
    takes = [f"Takes {options}.", ""] if options else []
    return "\n".join([*_paragraphs(comment), "", *takes, *table, ""])


def _first_code(lines: list[str]) -> int:
    return next((number for number, line in enumerate(lines) if line and not line.startswith("#")), len(lines))


def _paragraphs(comment: list[str]) -> list[str]:
    """Return the lines of a comment; indented ones, which are commands, become code blocks."""
    found, in_code = [], False
    for line in comment:
        if line.startswith("  ") != in_code:
            found.append("")
            in_code = not in_code
        found.append(f"    {line.strip()}" if in_code else line)
    return found


def _defaults(node: yaml.Node | None, group: str) -> Iterator[str]:
    """Yield the options in a file's defaults list, as GROUP=OPTION."""
    defaults = [value for key, value in (node.value if node else []) if key.value == "defaults"]
    for item in defaults[0].value if defaults else []:
        if isinstance(item, yaml.MappingNode):
            ((key, value),) = item.value
            name = key.value.removeprefix("override ").removeprefix("/")
            if not name.startswith("hydra/"):
                yield f"{name}={value.value}"
        elif item.value != "_self_":
            yield f"{item.value}.yaml" if group == CONFIGS.name else f"{group}={item.value}"


def _keys(node: yaml.Node | None, lines: list[str], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every key of a mapping with its value as written and the comment beside it."""
    if node is None:
        return
    for key_node, value in node.value:
        key = above + key_node.value
        if key in ("defaults", "hydra"):  # the files that Hydra composes, and its own settings
            continue
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, lines, f"{key}.")
            continue
        start, end = value.start_mark, value.end_mark
        comment = lines[end.line][end.column :].partition("#")[2].strip() if start.line == end.line else ""
        yield key, lines[start.line][start.column : end.column] or "null", comment
