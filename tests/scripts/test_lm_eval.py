"""The harness is started as by its own command, and knows our models. Not being required, it is stood in for."""

import re

import pytest

from tests.tiny_runs import run

HARNESS = """
import sys
from transformers import AutoConfig

def cli_evaluate():
    print(sys.argv[1:], type(AutoConfig.for_model("flashrnn")).__name__)
"""


@pytest.mark.slow
def test_the_harness_gets_its_arguments_and_finds_our_models(tmp_path):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(HARNESS)
    ended = run("scripts.lm_eval", "run", "--tasks", "x", folder=tmp_path)
    assert ended.stdout == "['run', '--tasks', 'x'] FlashRNNConfig\n", ended.stderr


def test_without_the_harness_it_says_how_to_get_it(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(\"No module named 'lm_eval'\")")
    ended = run("scripts.lm_eval", folder=tmp_path)
    assert re.fullmatch("error: .*'lm_eval'.*pip install lm_eval\n", ended.stderr)
