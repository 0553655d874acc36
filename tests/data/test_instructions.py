"""Instruction data: loss on responses only, with and without a chat template."""

import json

import numpy as np
import pytest
import torch

from data import tokenization
from data.examples import encode
from data.instructions import Instructions
from data.tasks import IGNORE
from scripts.train import train
from tests.tiny_runs import SHORT, TINY, config
from training import checkpoint
from training.export import export, load

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PAIRS = [{"prompt": f"What is {n} plus {n}? ", "response": f"It is {2 * n}."} for n in range(40)]


def messages(*contents):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with examples as pairs and as messages, a template, and a tokenizer without a template."""
    folder = tmp_path_factory.mktemp("instructions")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    chats = [messages(p["prompt"], p["response"], "And then?", "No more.") for p in PAIRS]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "template.jinja").write_text(TEMPLATE)
    texts = [text for pair in PAIRS for text in pair.values()]
    tokenization.train([*texts, "[user][assistant]And then? No more.\n"] * 3, 290).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def make(folder, tmp_path):
    def build(name="pairs", **options):
        shape = {"context_length": 64, "batch_size": 4, "val_fraction": 0.2, "cache_dir": str(tmp_path)}
        module = Instructions(
            str(folder / f"{name}.jsonl"), tokenizer=str(folder / "tokenizer"), **{**shape, **options}
        )
        module.prepare_data()
        module.setup()
        return module

    return build


def learnt(module, row):
    """Return the text of a row's labels, by example."""
    labels = row["labels"][row["labels"] != IGNORE]
    return module.tokenizer.decode(labels).split("<|endoftext|>")[:-1]


@pytest.mark.parametrize("packed", [True, False])
def test_labels_are_only_the_responses(make, packed):
    module = make(reset_at_documents=packed)
    data = module.train_data
    rows = [{name: part[0] for name, part in data[[number]].items()} for number in range(len(data))]
    assert [text for row in rows for text in learnt(module, row)] == [
        pair["response"] for pair in PAIRS if pair["response"] in {t for row in rows for t in learnt(module, row)}
    ]
    assert (len(rows) < data.examples) == packed == ("reset" in rows[0])
    for row in rows:
        starts = row["reset"].nonzero().flatten().tolist() if packed else [0]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            inputs, labels = row["input_ids"][start:end], row["labels"][start:end]
            assert inputs[0] == module.tokenizer.eos_token_id
            assert labels[0] == IGNORE
            scored = labels[:-1] != IGNORE
            assert torch.equal(labels[:-1][scored], inputs[1:][scored])
            assert module.tokenizer.decode(inputs[1:]).startswith("What is ")


def test_splits_contain_all_examples_once(make):
    module = make()
    assert module.train_data.examples + module.val_data.examples == 40
    assert module.prepared()["train"]["documents"] == module.train_data.examples > 20
    assert module.val_data.examples > 2


def test_examples_without_room_for_the_response_are_skipped(make):
    longest = max(map(len, make(reset_at_documents=False).train_data.prompts(99)))  # with an end of text first
    with pytest.warns(UserWarning, match="context_length="):
        data = make(context_length=longest - 1).train_data
    assert 0 < data.left_out < data.examples
    assert all((data[[row]]["labels"] != IGNORE).any() for row in range(len(data)))


@pytest.mark.parametrize("packed", [True, False])
def test_samples_begin_with_prompts(make, packed):
    module = make(reset_at_documents=packed)
    texts = [module.tokenizer.decode(prompt) for prompt in module.samples(2, 4)]
    prompts = {f"<|endoftext|>{pair['prompt']}" for pair in PAIRS}
    assert len(texts) == 2
    assert prompts.issuperset(texts)


def test_template_formats_messages(make, folder):
    module = make("chats", chat_template=str(folder / "template.jinja"), context_length=200)
    row = {name: part[0] for name, part in module.val_data[[0]].items()}
    first = learnt(module, row)[0]
    assert first.startswith("It is ")
    assert first.endswith(".\nNo more.\n")
    text = module.tokenizer.decode(row["input_ids"])
    assert text.startswith("<|endoftext|>[user]What is ")
    assert "[assistant]It is" in text
    assert "\n[user]And then?\n[assistant]No more.\n" in text
    assert tokenization.load(str(module.tokenizer_folder)).chat_template == TEMPLATE  # exports contain it


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "text.*prompt and response, or messages"),
        (messages("a", "b"), r"data\.chat_template"),
        ({"prompt": "a", "response": ""}, "response"),
        ({"prompt": "a", "response": 3}, "3.* message"),
    ],
)
def test_invalid_examples_are_an_error(row, message, folder):
    with pytest.raises(ValueError, match=f"here.*{message}"):
        encode(row, tokenization.load(str(folder / "tokenizer")), "here")


def test_template_that_changes_earlier_messages_is_an_error(folder):
    tokenizer = tokenization.load(str(folder / "tokenizer"))
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(ValueError, match=r"here.*message "):
        encode(messages("a", "b"), tokenizer, "here")


def test_missing_tokenizer_is_an_error(folder, tmp_path):
    module = Instructions(str(folder / "pairs.jsonl"), tokenizer="bpe:300", cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"bpe:300.*init_from"):
        module.prepare_data()


def test_long_examples_are_truncated(make):
    with pytest.warns(UserWarning, match="context_length=12 "):
        module = make(context_length=12)
    assert module.train_data[[0]]["input_ids"].shape == (1, 12)


def test_resumed_training_sees_the_same_batches(make, fit, tmp_path):
    uninterrupted = fit(make(), max_steps=5)
    assert fit(make(), max_steps=5, ckpt_path=tmp_path / "step=2.ckpt") == uninterrupted[2:]


def test_language_model_can_be_fine_tuned(folder, tiny_config, tmp_path):
    """Training starts from its weights with its tokenizer, and the export contains the template."""
    base = tiny_config("text_tiny")
    train(base)
    tiny = [part for part in TINY["text_tiny"] if not part.startswith(("data.", "val_fraction"))]
    data = [f"data.source={folder}/chats.jsonl", f"data.chat_template={folder}/template.jinja", "data.batch_size=2"]
    run_dir = tmp_path / "outputs" / "answers"
    asked = ["experiment=text_tiny", "data=instructions", *data, *tiny, *SHORT, f"init_from={base.run_dir}"]
    result = train(config(*asked, f"run_dir={run_dir}"))
    assert np.isfinite(result["perplexity"])
    assert result["bits_per_byte"] > 0
    vocabularies = [tokenization.load(f"{run}/tokenizer").get_vocab() for run in (base.run_dir, run_dir)]
    assert vocabularies[0] == vocabularies[1]
    assert checkpoint.find(str(run_dir)).exists()
    export(str(run_dir), str(tmp_path / "out"))
    assert load(str(tmp_path / "out"))[1].chat_template == TEMPLATE
