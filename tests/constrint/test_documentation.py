"""The examples in the documentation run and print the documented output."""

import doctest
from pathlib import Path

import flashrnn.constrint

DOCUMENT = Path(__file__).parents[2] / "docs" / "constrint.md"


def test_documentation_page():
    failures, tests = doctest.testfile(
        str(DOCUMENT), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert tests
    assert not failures


def test_module_example(capsys):
    example = flashrnn.constrint.__doc__.split("\n\n", 1)[1]
    exec("\n".join(line.removeprefix("    ") for line in example.splitlines()), {})
    assert capsys.readouterr().out == "head_dim = 256, warps = 4, tile = 64\n"
