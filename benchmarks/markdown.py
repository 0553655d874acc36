"""Tables and pages in markdown, and sections of pages that scripts fill in."""

import re
from collections.abc import Iterable
from pathlib import Path

Table = list[list[str]]  # the header, then rows


def markdown(table: Table) -> str:
    """Return the table in markdown; columns of numbers after the first are aligned to the right."""
    header, *rows = table
    numeric = [all(row[k].lstrip("-")[:1].isdigit() for row in rows if row[k]) for k in range(1, len(header))]
    lines = [header, ["---", *("---:" if right else "---" for right in numeric)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page(data: Path, paragraphs: Iterable[str]) -> Path:
    """Write the page of a file of results next to it, with a last paragraph that names the file; return its path."""
    page = data.with_suffix(".md")
    last = (
        f"Data, with command, commit and machine: [{data.name}]({data.name}). "
        f"`python -m scripts.benchmark figures files=[{data.name}]` regenerates the page and the figure."
    )
    page.write_text("\n\n".join([*paragraphs, last]) + "\n")
    return page


def filled(text: str, made: dict[str, str]) -> str:
    """Return `text` with the sections between comments <!-- name --> and <!-- end --> replaced by made[name]."""
    for place, content in made.items():
        text, found = re.subn(rf"(<!-- {place} -->\n).*?(\n<!-- end -->)", rf"\1\n{content}\n\2", text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"found {found} sections {place}: expected one <!-- {place} --> with an <!-- end -->")
    return text
