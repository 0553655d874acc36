"""Text generation from a run, a checkpoint or an exported folder; errors have one line."""

import runpy

import pytest
import torch

from training import checkpoint
from training.export import export
from training.text_generation import generate

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}


def text(ckpt, seed=0, **options):
    common = {"prompt": "the 7th of", "device": "cpu", "dtype": "float32", "max_new_tokens": 12}
    return generate(str(ckpt), seed=seed, **common | SAMPLING | options)


@pytest.fixture
def run(trained):
    config, _ = trained
    return config.run_dir


def test_run_checkpoint_and_export_generate_the_same_text(run, tmp_path, capsys):
    export(run, tmp_path / "out")
    capsys.readouterr()
    found = [text(ckpt) for ckpt in (run, checkpoint.find(run), tmp_path / "out")]
    assert found[0].startswith("the 7th of")
    assert found[0] == found[1] == found[2]
    assert capsys.readouterr().out == "".join(f"{part}\n" for part in found)


def test_text_depends_on_seed_and_sampling(run):
    assert text(run, do_sample=False) == text(run, seed=1, do_sample=False)
    assert text(run) != text(run, seed=1)


def test_prompt_contains_no_special_tokens(run):
    """As in training documents, spelled out special tokens are ordinary text."""
    assert text(run, prompt="a <|endoftext|> b").startswith("a <|endoftext|> b")


def test_repetition_penalty_ignores_the_first_end_of_text(run, monkeypatch):
    seen = []

    def generate(model, ids, logits_processor, **options):
        scores = torch.ones(1, model.config.vocab_size)
        seen.append(logits_processor(ids, scores)[0])
        return torch.cat([ids, ids[:, :1]], dim=1)

    monkeypatch.setattr("models.hugging_face.FlashRNNForCausalLM.generate", generate)
    text(run, prompt="the", repetition_penalty=2.0)
    assert seen[0][0] == 1  # the end of text
    assert seen[0].min() == 0.5


def test_missing_prompt_starts_a_document(run):
    assert text(run, prompt="")


def test_unknown_dtype_is_an_error(run):
    with pytest.raises(ValueError, match="dtype=int8"):
        text(run, dtype="int8")


def test_generation_with_8_bit_weights(run):
    assert text(run, weights="int8").startswith("the 7th of")
    with pytest.raises(ValueError, match=r"weights=int4.* int8"):
        text(run, weights="int4")


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 2.0}, {"temperature": 0.0}, {"max_new_tokens": 0}])
@pytest.mark.parametrize("several", [{}, {"prompt": "", "prompts": "prompts.jsonl", "out": "answers.jsonl"}])
def test_invalid_number_is_an_error(wrong, several):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}: expected"):
        text("anywhere", **several, **wrong)


def test_unknown_device_is_an_error():
    with pytest.raises(ValueError, match=r"device=cuda:99.* cpu"):
        text("anywhere", device="cuda:99")


def test_prompt_on_the_command_line_is_not_parsed(run, monkeypatch, capsys):
    prompt = "{the: [7th], 'of' = forty, "
    monkeypatch.setattr("sys.argv", ["scripts.generate", f"ckpt={run}", f"prompt={prompt}", "max_new_tokens=5"])
    capsys.readouterr()
    runpy.run_module("scripts.generate", run_name="__main__")
    printed = capsys.readouterr()
    assert printed.out.startswith(prompt)
    assert "(5 tokens: " in printed.err
