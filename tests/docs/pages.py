"""The documentation's pages, and their Python code as a reader would run it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}

_BLOCK = re.compile(r'^```(?:python|\w+ title="(?P<file>.+?)")\n(?P<code>.*?)^```', flags=re.DOTALL | re.MULTILINE)


def has_code(page: str) -> bool:
    return _BLOCK.search(PAGES[page].read_text()) is not None


def run(page: str, folder: Path) -> dict:
    """Runs a page's Python blocks one after the other; the names that they define. A block with a title, in any
    language, is the file of that name in `folder`."""
    text, scope = PAGES[page].read_text(), {}
    for block in _BLOCK.finditer(text):
        if block["file"]:
            file = folder / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["code"])
        else:
            line = text.count("\n", 0, block.start("code"))  # so that a traceback names the line of the page
            exec(compile("\n" * line + block["code"], PAGES[page], "exec"), scope)
    return scope
