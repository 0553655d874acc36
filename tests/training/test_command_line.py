"""Command-line arguments are passed to Hydra with the meaning that users expect."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from training.arguments import literal, options_first, quoted, unquoted
from training.command_line import one_line_errors


def values(*arguments, **keys):
    return [override.value() for override in OverridesParser.create().parse_overrides(literal(arguments, **keys))]


@pytest.mark.parametrize("text", ["{the: [7th], 'of' = forty, ", "1", "null", "a, b", "it's \\", '"', "", "$x ${y}"])
def test_prompt_is_not_parsed(text):
    assert values(f"prompt={text}", texts=["prompt"]) == [text]


@pytest.mark.parametrize("path", ["outputs/lr=1e-3,x/it's a", "2026", "a(b)", "run/last.ckpt", "a b"])
def test_path_is_not_parsed(path):
    assert values(f"ckpt={path}", paths=["ckpt"]) == [path]
    assert unquoted(path) == path
    assert unquoted(quoted(path)) == path


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ('["\\n\\n", "it\'s, {a}"]', ["\n\n", "it's, {a}"]), ("[INST]", "[INST]"), ("[1]", "[1]"), ("a, b", "a, b"),
    ],
)  # fmt: skip
def test_stop_is_a_string_or_a_json_list(given, taken):
    assert values(f"stop={given}", lists=["stop"]) == [taken]


def test_quoted_paths_null_and_other_keys_are_unchanged():
    given = ["ckpt='a b'", "ckpt_path=null", "data.eval_lengths=[6,9]"]
    assert values(*given, paths=["ckpt", "ckpt_path"]) == ["a b", None, [6, 9]]


def test_options_may_be_between_overrides():
    given = ["experiment=mine", "--config-dir", "a=b", "seed=1", "-m", "model=gru,lstm", "--config-dir=c"]
    options = ["--config-dir", "a=b", "-m", "--config-dir=c"]
    assert options_first(given) == [*options, "experiment=mine", "seed=1", "model=gru,lstm"]


@pytest.mark.parametrize(("word", "instead"), [("--optim.lr=1", "optim.lr=1"), ("--experiment", "experiment=VALUE")])
def test_settings_with_dashes_are_an_error(word, instead):
    with pytest.raises(ValueError, match=f"^{word}: .*{instead}$"):
        options_first([word])


def test_sweep_over_paths():
    assert literal(["-m", "ckpt=a,b"], paths=["ckpt"]) == ["-m", "ckpt=a,b"]


def test_error_message_contains_its_reason_once():
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise OSError("x could not be written (full)") from OSError("full")
    assert ended.value.code.count("full") == 1
    with pytest.raises(SystemExit, match="x: full"), one_line_errors():
        raise ValueError("x") from OSError("full")
