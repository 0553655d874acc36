"""The pages of the documentation, and functions that run their code like a reader."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}

_BLOCK = re.compile(r'^```(?:python|\w+ title="(?P<file>.+?)")\n(?P<code>.*?)^```', flags=re.DOTALL | re.MULTILINE)


# A separate line, not code in a sentence; it may be continued, and started by srun or torchrun.
_COMMAND = re.compile(r"^ *(srun |torchrun .*)?(?:python )?-m ((?:\\\n|.)+)$", flags=re.MULTILINE)


def commands(page: str) -> list[tuple[list[str], bool]]:
    """Return the arguments of each `python -m` in a page, and whether several processes run it."""
    found = _COMMAND.findall(PAGES[page].read_text())
    return [(shlex.split(text.replace("\\\n", ""), comments=True), bool(many)) for many, text in found]


def has_code(page: str) -> bool:
    return _BLOCK.search(PAGES[page].read_text()) is not None


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of a page that have a title, in any language, to files of these names in `folder`."""
    for block in _BLOCK.finditer(PAGES[page].read_text()):
        if block["file"]:
            file = folder / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["code"])


def run(page: str, folder: Path) -> dict:
    """Run the Python blocks of a page in order, with its files in `folder`; return the names that they define."""
    write_files(page, folder)
    text, scope = PAGES[page].read_text(), {}
    for block in _BLOCK.finditer(text):
        if not block["file"]:
            line = text.count("\n", 0, block.start("code"))  # so that tracebacks contain the line of the page
            exec(compile("\n" * line + block["code"], PAGES[page], "exec"), scope)
    return scope
