"""README.md says what was measured."""

import pytest

from benchmarks.markdown import filled
from docs.tools.readme import PAGE, page


def test_the_readme_shows_what_is_in_the_results():
    assert PAGE.read_text() == page(), "python -m docs.tools.readme updates it"


def test_a_place_that_is_not_there_is_an_error():
    assert filled("<!-- a -->\nold\n<!-- end -->", {"a": "new"}) == "<!-- a -->\n\nnew\n\n<!-- end -->"
    with pytest.raises(ValueError, match="0 sections b"):
        filled("<!-- a -->\n<!-- end -->", {"b": "new"})
