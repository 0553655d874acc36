"""The tables in docs/backends.md are up to date."""

import pytest

from docs.tools.backend_tables import PAGE, page, shared


@pytest.mark.slow  # solves for the tilings of all GPUs and sizes
def test_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m docs.tools.backend_tables updates it"


def test_equal_rows_and_columns_are_merged():
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
