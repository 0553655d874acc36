"""The documentation's pages, and their Python code as a reader would run it."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}

_BLOCK = re.compile(r'^```(?:python|\w+ title="(?P<file>.+?)")\n(?P<code>.*?)^```', flags=re.DOTALL | re.MULTILINE)


# A line of its own, not one within a sentence; perhaps continued, and started by a program that starts many of it.
_COMMAND = re.compile(r"^ *(srun |torchrun .*)?(?:python )?-m ((?:\\\n|.)+)$", flags=re.MULTILINE)


def commands(page: str) -> list[tuple[list[str], bool]]:
    """The arguments of the page's `python -m`, each with whether many processes run it."""
    found = _COMMAND.findall(PAGES[page].read_text())
    return [(shlex.split(text.replace("\\\n", ""), comments=True), bool(many)) for many, text in found]


def has_code(page: str) -> bool:
    return _BLOCK.search(PAGES[page].read_text()) is not None


def write_files(page: str, folder: Path) -> None:
    """Writes a page's blocks that have a title, in any language, to the files of these names in `folder`."""
    for block in _BLOCK.finditer(PAGES[page].read_text()):
        if block["file"]:
            file = folder / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["code"])


def run(page: str, folder: Path) -> dict:
    """Runs a page's Python blocks one after the other, its files in `folder`; the names that they define."""
    write_files(page, folder)
    text, scope = PAGES[page].read_text(), {}
    for block in _BLOCK.finditer(text):
        if not block["file"]:
            line = text.count("\n", 0, block.start("code"))  # so that a traceback names the line of the page
            exec(compile("\n" * line + block["code"], PAGES[page], "exec"), scope)
    return scope
