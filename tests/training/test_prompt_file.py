"""Answers to a file of prompts: their order, resuming, and errors with one line."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from training import text_generation as command
from training.prompt_file import read_prompts
from training.text_generation import StopStrings, generate, stop_strings

GREEDY = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
SAMPLING = GREEDY | {"do_sample": True, "top_p": 0.9}
PROMPTS = ["the 7th of", "", "forty texts says", "the 7th of", "9", "says 12 and 1728. the"]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder of a byte-level model that sometimes ends its texts."""
    folder = tmp_path_factory.mktemp("exported")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: n for n, letter in enumerate([END, *alphabet])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END, padding_side="left")
    mixer = {"name": "RNNMixer", "function": "slstm", "num_heads": 2}
    torch.manual_seed(0)
    model = FlashRNNForCausalLM(FlashRNNConfig(vocab_size=257, d_model=16, num_blocks=2, mixer=mixer))
    model.model.head.weight.data[0] *= 4
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def write(file, prompts):
    file.write_text("".join(json.dumps({"prompt": prompt, "id": n}) + "\n" for n, prompt in enumerate(prompts)))
    return file


def answers(exported, prompts, out, **options):
    common = {"device": "cpu", "dtype": "float32", "seed": 0, "max_new_tokens": 25, "slots": 3, **SAMPLING}
    generate(str(exported), prompts=str(prompts), out=str(out), **common | options)
    with out.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_answers_have_the_order_of_the_prompts(exported, prompts, tmp_path):
    found = answers(exported, prompts, tmp_path / "out.jsonl")
    assert [(line["prompt"], line["id"]) for line in found] == list(zip(PROMPTS, range(6), strict=True))
    assert {line["reason"] for line in found} == {"end_of_text", "length"}
    for line in found:
        ended = line["reason"] == "end_of_text"
        assert (line["tokens"][-1] == 0) == ended
        assert 0 not in line["tokens"][:-1]
        assert len(line["tokens"]) == 25 or ended


def test_answers_do_not_depend_on_the_number_of_slots(exported, prompts, tmp_path):
    found = [answers(exported, prompts, tmp_path / f"{slots}.jsonl", slots=slots) for slots in (1, 4, 100)]
    assert found[0] == found[1] == found[2]


def test_prompt_gets_the_same_text_as_alone(exported, prompts, tmp_path, capsys):
    found = answers(exported, prompts, tmp_path / "out.jsonl")
    alone = generate(
        str(exported), prompt=PROMPTS[2], device="cpu", dtype="float32", seed=0, max_new_tokens=25, **SAMPLING
    )
    assert alone == PROMPTS[2] + found[2]["text"]


def test_repeated_prompt_gets_different_texts(exported, prompts, tmp_path):
    found = answers(exported, prompts, tmp_path / "out.jsonl")
    assert found[0]["text"] != found[3]["text"]


def test_greedy_answers_with_a_penalty(exported, prompts, tmp_path):
    greedy = answers(exported, prompts, tmp_path / "a.jsonl", **GREEDY)
    assert greedy[0]["text"] == greedy[3]["text"]
    alone = generate(
        str(exported), prompt=PROMPTS[5], device="cpu", dtype="float32", seed=0, max_new_tokens=25,
        **GREEDY | {"repetition_penalty": 1.5},
    )  # fmt: skip
    penalized = answers(exported, prompts, tmp_path / "b.jsonl", **GREEDY | {"repetition_penalty": 1.5})
    assert PROMPTS[5] + penalized[5]["text"] == alone


def test_text_ends_after_the_stop_string(exported, prompts, tmp_path):
    whole = answers(exported, prompts, tmp_path / "a.jsonl")
    string = whole[1]["text"][3:5]
    stopped = answers(exported, prompts, tmp_path / "b.jsonl", stop=string)
    assert stopped[1]["reason"] == "stop_string"
    assert stopped[1]["text"].endswith(string)
    for before, after in zip(whole, stopped, strict=True):
        assert before["text"].startswith(after["text"])
        assert (string in before["text"]) == (after["reason"] == "stop_string")


def test_first_of_several_stop_strings_ends_the_text(exported, capsys):
    one = {"prompt": "the", "device": "cpu", "dtype": "float32", "seed": 0, "max_new_tokens": 16, **SAMPLING}
    whole = generate(str(exported), **one)
    first, *_, last = (letter for letter in whole[3:] if letter.isascii())
    assert generate(str(exported), **one, stop=[last, first]) == whole[: whole.index(first, 3) + 1]


class TestResuming:
    @pytest.fixture
    def whole(self, exported, prompts, tmp_path):
        return answers(exported, prompts, tmp_path / "out.jsonl")

    def test_interrupted_file_is_continued(self, whole, exported, prompts, tmp_path):
        out = tmp_path / "out.jsonl"
        content = out.read_bytes()
        out.write_bytes(content[: len(content) // 2])  # within a line
        assert answers(exported, prompts, out) == whole

    def test_interrupt_leaves_complete_lines(self, exported, prompts, tmp_path, monkeypatch):
        """The file contains all answers before the first unfinished one."""
        out, number = tmp_path / "out.jsonl", 0

        class Bar(command.Progress):
            def update(self, n=1):
                nonlocal number
                number += 1
                if number == 4:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(command, "Progress", Bar)
            with pytest.raises(KeyboardInterrupt):
                answers(exported, prompts, out, slots=1)
        assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == PROMPTS[:4]
        before = out.read_text()
        answers(exported, prompts, out)
        assert out.read_text().startswith(before)

    def test_complete_file_is_unchanged(self, whole, exported, prompts, tmp_path):
        assert answers(exported, prompts, tmp_path / "out.jsonl") == whole

    def test_other_settings_are_an_error(self, whole, exported, prompts, tmp_path):
        with pytest.raises(ValueError, match=r"out\.jsonl .*seed=0"):
            answers(exported, prompts, tmp_path / "out.jsonl", seed=1)
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(whole)

    def test_other_prompts_are_an_error(self, whole, exported, prompts, tmp_path):
        write(prompts, ["other", *PROMPTS[1:]])
        with pytest.raises(ValueError, match=r"out\.jsonl, line 1 .*out"):
            answers(exported, prompts, tmp_path / "out.jsonl")

    def test_other_files_are_not_overwritten(self, exported, prompts, tmp_path):
        (tmp_path / "out.jsonl").write_text("mine\n")
        with pytest.raises(ValueError, match="choose another file"):
            answers(exported, prompts, tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("the 7th", r"prompts.jsonl, line 7 is not JSON \(.*\): expected {\"prompt\": \"...\"}"),
        ('"the 7th"', r"prompts.jsonl, line 7: expected {\"prompt\": \"...\"}, found \"the 7th\""),
        ('{"text": "a"}', 'prompts.jsonl, line 7: expected .*, found {"text": "a"}'),
        ('{"prompt": 7}', 'prompts.jsonl, line 7: expected .*, found {"prompt": 7}'),
    ],
)
def test_error_names_the_invalid_line_and_keeps_answers(line, message, exported, prompts, tmp_path):
    whole = answers(exported, prompts, tmp_path / "out.jsonl")
    prompts.write_text(f"{prompts.read_text()}{line}\n")
    with pytest.raises(ValueError, match=message):
        answers(exported, prompts, tmp_path / "out.jsonl")
    write(prompts, [*PROMPTS, "more"])
    assert answers(exported, prompts, tmp_path / "out.jsonl")[:6] == whole


def test_only_newlines_end_lines(exported, tmp_path):
    """JSON may contain other characters at which str.splitlines splits."""
    file, prompts = tmp_path / "prompts.jsonl", ["a\u2028b\x85c", "d"]
    file.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts), "utf-8")
    for _ in range(2):  # the second call reads the answers of the first
        assert [line["prompt"] for line in answers(exported, file, tmp_path / "out.jsonl")] == prompts


def test_byte_order_mark_is_accepted_and_other_encodings_are_an_error(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n', "utf-8-sig")
    assert read_prompts(file) == [{"prompt": "a"}]
    file.write_text('{"prompt": "caf\u00e9"}\n', "latin-1")
    with pytest.raises(ValueError, match=r"prompts\.jsonl is not in UTF-8"):
        read_prompts(file)


def test_file_without_prompts_is_an_error(exported, tmp_path):
    assert answers(exported, write(tmp_path / "none.jsonl", []), tmp_path / "out.jsonl") == []


@pytest.mark.parametrize(
    "options", [{"prompts": "a"}, {"out": "b"}, {"prompts": "a", "out": "b", "prompt": "c"}], ids=" ".join
)
def test_either_prompt_or_file_is_required(options):
    with pytest.raises(ValueError, match=r"prompt.*prompts.*out"):
        generate("anywhere", **options)


@pytest.mark.parametrize("name", ["slots", "max_new_tokens"])
def test_invalid_sizes_are_an_error(name, exported, prompts, tmp_path):
    with pytest.raises(ValueError, match=f"{name}=0.* 1"):
        answers(exported, prompts, tmp_path / "out.jsonl", **{name: 0})


def test_out_of_memory_is_an_error_with_advice(exported, prompts, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And so on")
        yield

    monkeypatch.setattr(command, "answers", full)
    with pytest.raises(ValueError, match=r"slots=3"):
        answers(exported, prompts, tmp_path / "out.jsonl")


class TestStopStrings:
    """Stop strings in the last tokens, which may contain parts of them."""

    class Letters:
        def decode(self, tokens):
            return "".join(map(chr, tokens))

    @pytest.mark.parametrize(
        ("text", "before", "end"), [("a stop b", 0, 6), ("a stop", 5, 6), ("a stop b", 6, None), ("sto", 0, None)]
    )
    def test_text_is_cut_at_the_stop_string(self, text, before, end):
        assert StopStrings(self.Letters(), ["stop"])([ord(letter) for letter in text], before) == end

    def test_first_stop_string_is_found(self):
        assert StopStrings(self.Letters(), ["b stop", "top"])([*map(ord, "a stop b stop")], 0) == 6

    @pytest.mark.parametrize("wrong", [["a", ""], ["a", 7]])
    def test_stop_must_be_strings(self, wrong):
        with pytest.raises(ValueError, match=r"stop=\['a', .*list of strings"):
            stop_strings(wrong)
