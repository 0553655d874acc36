"""scripts.lm_eval starts lm_eval with our models registered. A fake replaces the package, which is not required."""

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
def test_lm_eval_receives_its_arguments_and_finds_our_models(tmp_path):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(HARNESS)
    ended = run("scripts.lm_eval", "run", "--tasks", "x", folder=tmp_path)
    assert ended.stdout == "['run', '--tasks', 'x'] FlashRNNConfig\n", ended.stderr


def test_missing_lm_eval_is_an_error_with_advice(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(\"No module named 'lm_eval'\")")
    ended = run("scripts.lm_eval", folder=tmp_path)
    assert re.fullmatch("error: .*'lm_eval'.*pip install lm_eval\n", ended.stderr)
