"""docs/backends.md says what the code does."""

import pytest

from docs.tools.backend_tables import PAGE, page, shared


@pytest.mark.slow  # tilings of all GPUs and sizes are solved for
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m docs.tools.backend_tables updates it"


def test_rows_and_columns_that_agree_are_shared():
    rows = [
        ["size", "cell", "A", "B", "C"],
        ["1", "x", "p", "p", "q"],
        ["1", "y", "p", "p", "q"],
        ["2", "x", "p", "p", "q"],
        ["2", "y", "p", "p", "q"],
        ["3", "x", "q", "q", "q"],
        ["3", "y", "p", "p", "q"],
    ]
    assert shared(rows, labels=2) == [
        ["size", "cell", "A, B", "C"],
        ["1, 2", "x, y", "p", "q"],
        ["3", "x", "q", "q"],
        ["3", "y", "p", "q"],
    ]
