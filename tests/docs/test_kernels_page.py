"""The functions in the page on kernels exist."""

import re

from tests.docs.pages import PAGES, ROOT

SECTION = "## One LSTM step, from Python to the mma and back"
STATION = re.compile(r"^\| `([^`]+)` \| (`[^|]+`) \|", flags=re.MULTILINE)


def stations() -> list[tuple[str, str]]:
    """Return file and function of each row in the table of a step."""
    section = PAGES["docs/kernels.md"].read_text().split(SECTION)[1].split("\n## ")[0]
    return [(file, name) for file, names in STATION.findall(section) for name in re.findall(r"`([^`]+)`", names)]


def test_table_of_a_step_contains_the_mma():
    found = stations()
    assert found[0] == ("flashrnn/layer.py", "FlashRNN.forward")
    assert {("kernels/common.cuh", "mma"), ("resident/kernels/backward.cuh", "step_backward")} < set(found)


def test_functions_exist():
    for file, function in stations():
        text = (ROOT / (file if file.startswith("flashrnn/") else f"flashrnn/cuda/{file}")).read_text()
        for name in function.split("."):
            in_python, in_cuda = rf"^ *(?:def|class) {name}\b", rf"^(?: *DEVICE (?:\w+ )+)?{name}\("
            pattern = in_python if file.endswith(".py") else in_cuda
            assert re.search(pattern, text, flags=re.MULTILINE), (file, name)
