"""What the README and the documentation show works: their Python code runs, their commands exist."""

import re
import shlex
from importlib.util import find_spec

import pytest

from scripts.overrides import check_overrides
from tests.docs.pages import PAGES, has_code
from tests.scripts.conftest import config

TUTORIAL = "docs/tutorial_cell.md"  # has a test file of its own


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page) and page != TUTORIAL])
def test_code_runs(run_page, page):
    run_page(page)


def train_commands(text):
    for line in re.findall(r"^ *(python -m scripts\.train\b.*)$", text, flags=re.MULTILINE):
        yield [argument for argument in shlex.split(line, comments=True)[3:] if argument != "-m"]


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if list(train_commands(path.read_text()))])
def test_training_commands_name_options_and_keys_that_exist(page):
    for arguments in train_commands(PAGES[page].read_text()):
        check_overrides(arguments)
        config(*(re.sub(r"=(\w+),.*", r"=\1", argument) for argument in arguments))  # of a sweep its first run


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_programs_that_exist(page):
    for module in re.findall(r"python -m (scripts[\w.]*\w)", PAGES[page].read_text()):
        assert find_spec(module), module
