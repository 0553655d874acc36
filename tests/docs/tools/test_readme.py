"""The numbers in README.md are up to date."""

import pytest

from benchmarks.markdown import filled
from docs.tools.readme import PAGE, page


def test_readme_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m docs.tools.readme updates it"


def test_missing_section_is_an_error():
    assert filled("<!-- a -->\nold\n<!-- end -->", {"a": "new"}) == "<!-- a -->\n\nnew\n\n<!-- end -->"
    with pytest.raises(ValueError, match="0 sections b"):
        filled("<!-- a -->\n<!-- end -->", {"b": "new"})
