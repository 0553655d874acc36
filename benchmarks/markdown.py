"""Tables in markdown, and places of pages that scripts fill."""

import re

Table = list[list[str]]  # the header, then rows


def markdown(table: Table) -> str:
    header, *rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(text: str, made: dict[str, str]) -> str:
    """Return `text` with what is made by a script between the comments <!-- name --> and <!-- end -->."""
    for place, content in made.items():
        text, found = re.subn(rf"(<!-- {place} -->\n).*?(\n<!-- end -->)", rf"\1\n{content}\n\2", text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{found} places are called {place}: expected one <!-- {place} --> and an <!-- end -->")
    return text
