import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from data import corpora, hub, preparation, tokenization
from data.encoding import Encoder
from data.tasks import IGNORE
from data.text import Text

WORDS = ["the", "state", "of", "a", "recurrent", "network", "is", "what", "it", "keeps", "of", "its", "past"]
EMOJI = "🙂"


def sentences(count):
    rng = np.random.default_rng(0)
    return [f"{i}: {' '.join(rng.choice(WORDS, 30))} {EMOJI}" for i in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write 60 documents of about 80 tokens as JSON lines in three files."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"text": text, "meta": {"i": i}}) for i, text in enumerate(sentences(60))]
    for i in range(3):
        (folder / f"{i}.jsonl").write_text("\n".join(rows[20 * i : 20 * (i + 1)]))
    return str(folder / "*.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a saved tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenization.train(sentences(20), 300).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(corpus, cache):
    """Return a function that builds a Text module with its data; tests share the cache."""

    def build(**overrides):
        defaults = {"tokenizer": "bpe:300", "context_length": 16, "batch_size": 4, "val_fraction": 0.2}
        module = Text(**{"source": corpus, "cache_dir": str(cache), **defaults, **overrides})
        module.prepare_data()
        module.setup()
        return module

    return build


def all_tokens(blocks):
    return np.concatenate([np.fromfile(path, np.uint16) for path in blocks.paths]).tolist()


def in_file_order(blocks):
    return blocks[range(len(blocks))]


def folder_of(blocks):
    return blocks.paths[0].parent


def test_blocks_contain_every_document_once_in_order(make):
    module = make()
    for blocks, validation in ((module.train_data, False), (module.val_data, True)):
        expected = [text for text in sentences(60) if corpora.held_out(text, 0.2) == validation]
        assert module.tokenizer.decode(all_tokens(blocks)) == "".join(text + "<|endoftext|>" for text in expected)
        batch = in_file_order(blocks)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        used = len(blocks) * 16
        assert batch["input_ids"].flatten().tolist() == all_tokens(blocks)[:used]
        assert batch["labels"].flatten().tolist() == all_tokens(blocks)[1 : used + 1]
        assert len(all_tokens(blocks)) - used <= 16


def test_reset_is_at_the_end_of_text_before_a_document(make):
    """Generation also begins with an end of text before the prompt."""
    batch = in_file_order(make(reset_at_documents=True).train_data)
    assert batch["reset"].sum() > 30
    assert batch["reset"].dtype == torch.bool
    assert batch["reset"].equal(batch["input_ids"] == 0)
    assert "reset" not in in_file_order(make().train_data)


def test_manifest_describes_the_folder(make):
    module = make()
    manifest = json.loads((module.folder / "manifest.json").read_text())
    assert module.folder.name.endswith(manifest["hash"])
    assert manifest["identity"]["tokenizer"] == "bpe:300"
    assert manifest["tokenizer"]["vocab_size"] == module.vocab_size == module.num_classes == len(module.tokenizer)
    assert manifest["dtype"] == "uint16"
    splits = manifest["totals"]
    assert splits["train"]["documents"] + splits["validation"]["documents"] == 60
    assert splits["train"]["tokens"] == len(all_tokens(module.train_data))


def test_text_is_packed_once(make, monkeypatch):
    make()
    monkeypatch.setattr("data.preparation._write_remaining", lambda *args: pytest.fail("packed again"))
    make(context_length=32, batch_size=2, seed=1, reset_at_documents=True, max_val_blocks=3)


def test_other_sources_and_tokenizers_have_other_folders(make, corpus, tmp_path):
    source = Path(corpus).parent
    folders = set()

    def add(**arguments):
        folders.add(folder_of(make(**arguments).train_data))

    add()
    add(tokenizer="bpe:280")
    add(val_fraction=0.3)
    add(max_bytes=5000)
    own = tmp_path / "0.jsonl"
    shutil.copy(source / "0.jsonl", own)
    add(source=str(own))
    own.write_text(own.read_text() + '\n{"text": "one more"}\n')
    add(source=str(own))
    assert len(folders) == 6


def test_one_of_several_processes_packs(corpus, tmp_path, monkeypatch):
    builds = []
    build = preparation._write_remaining
    monkeypatch.setattr(preparation, "_write_remaining", lambda *args: (builds.append(1), build(*args)))
    modules = [Text(corpus, tokenizer="bpe:300", cache_dir=str(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Text.prepare_data, modules))
    assert len(builds) == 1


def test_unigram_perplexity(make):
    module = make()
    train, validation = (in_file_order(data)["labels"].flatten() for data in (module.train_data, module.val_data))
    probability = (torch.bincount(train, minlength=module.vocab_size) + 1).double()
    probability /= probability.sum()
    assert module.unigram_perplexity() == pytest.approx(float(probability[validation].log().mean().neg().exp()))


@pytest.mark.parametrize("legacy", [False, True])
def test_bytes_per_label(make, legacy, tmp_path):
    """For a byte-level vocabulary, and for one like SentencePiece's with special spaces and bytes."""
    overrides = {}
    if legacy:
        pieces = {piece: i for i, piece in enumerate(["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"])}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], byte_fallback=True, unk_token="</s>"))
        bpe.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(tmp_path)
        overrides["tokenizer"] = str(tmp_path)
    module = make(**overrides)
    labels = in_file_order(module.val_data)["labels"].flatten().tolist()
    end = module.tokenizer.eos_token_id
    sizes = [len(text.encode()) for text in sentences(60) if corpora.held_out(text, 0.2)]
    bytes_of_labels = module.bytes_per_label * len(labels)
    assert sum(sizes[: labels.count(end)]) - 16 <= bytes_of_labels <= sum(sizes)  # without the last rest


def test_validation_can_be_limited(make):
    module = make(max_val_blocks=6)
    assert [len(batch["labels"]) for batch in module.val_dataloader()] == [4, 2]


def test_validation_lanes_contain_every_block_once(make):
    blocks = make(stateful=True, batch_size=3)
    batches = list(blocks.val_dataloader())
    assert [batch["continues"].any().item() for batch in batches] == [False] + [True] * (len(batches) - 1)
    labels = torch.cat([batch["labels"] for batch in batches], dim=1)  # [3, tokens per lane]
    expected = blocks.val_data[range(len(blocks.val_data))]["labels"].flatten()
    assert torch.equal(labels[labels != IGNORE], expected)


def test_lanes_have_the_requested_length(make):
    module = make(stateful=True, batch_size=3, lane_tokens=4 * make().context_length)
    batches = list(module.train_dataloader())
    assert [batch["continues"].tolist() for batch in batches[:5]] == [[k % 4 > 0] * 3 for k in range(5)]
    for before, after in itertools.pairwise(batches[:4]):
        assert torch.equal(before["labels"][:, -1], after["input_ids"][:, 0])


def test_order_is_independent_of_workers(make):
    batches = [[batch["input_ids"].tolist() for batch in make(num_workers=n).train_dataloader()] for n in (0, 2)]
    assert batches[0] == batches[1]
    assert len(batches[0]) == len(make().train_data) // 4


@pytest.mark.parametrize(("behind_the_epoch", "num_workers"), [(-2, 2), (0, 0), (1, 0)])
def test_resumed_training_sees_the_same_batches(make, fit, tmp_path, behind_the_epoch, num_workers):
    arguments = {"batch_size": 25, "num_workers": num_workers}
    per_epoch = len(make(**arguments).train_dataloader())
    taken, end = per_epoch + behind_the_epoch, 2 * per_epoch + 3
    uninterrupted = fit(make(**arguments), max_steps=end)
    resumed = fit(make(**arguments), max_steps=end, ckpt_path=tmp_path / f"step={taken}.ckpt")
    assert resumed == uninterrupted[taken:]


@pytest.mark.parametrize("arguments", [{}, {"streaming": True, "max_val_blocks": 5, "shuffle_blocks": 10}])
def test_two_ranks_resume_with_their_own_batches(make, fit, tmp_path, arguments):
    uninterrupted = fit(make(**arguments), max_steps=6, devices=2)
    assert uninterrupted[0] != uninterrupted[1]
    resumed = fit(make(**arguments), max_steps=6, devices=2, ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed == [seen[4:] for seen in uninterrupted]


class TestStreaming:
    arguments = {"streaming": True, "max_val_blocks": 5, "shuffle_blocks": 0}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _fewer_documents_at_once_than_there_are(self, monkeypatch):
        monkeypatch.setattr("data.streaming.DOCUMENTS_AT_ONCE", 7)

    def test_streamed_blocks_equal_stored_blocks(self, make):
        module = make(**self.arguments)
        loader = iter(module.train_dataloader())
        tokens = torch.cat([next(loader)["input_ids"].flatten() for _ in range(8)])
        stored = make().train_data  # with the same tokenizer, which was trained on the same text
        assert tokens.tolist() == all_tokens(stored)[: len(tokens)]
        assert not list(module.folder.glob("train-*"))

    def test_validation_is_stored_in_advance(self, make):
        module = make(**self.arguments)
        assert len(module.val_data) == 5
        assert all_tokens(module.val_data) == all_tokens(make().val_data)[: len(all_tokens(module.val_data))]

    def test_stream_starts_again_at_the_end(self, make):
        module = make(**self.arguments, batch_size=64)
        loader = iter(module.train_dataloader())
        tokens = torch.cat([next(loader)["input_ids"].flatten() for _ in range(8)]).tolist()
        once = all_tokens(make().train_data)
        assert len(tokens) > 2 * len(once)
        assert tokens == list(itertools.islice(itertools.cycle(once), len(tokens)))

    @pytest.mark.parametrize(
        ("shuffle_blocks", "num_workers"), [(0, 0), (100, 0), pytest.param(100, 1, marks=pytest.mark.slow)]
    )
    def test_resumed_stream_has_the_same_batches(self, make, fit, tmp_path, shuffle_blocks, num_workers):
        """It is resumed within a shuffled window of four batches, in the second pass over the corpus."""
        arguments = {**self.arguments, "batch_size": 32, "shuffle_blocks": shuffle_blocks}
        uninterrupted = fit(make(**arguments), max_steps=12)
        module = make(**arguments, num_workers=num_workers)
        assert fit(module, max_steps=12, ckpt_path=tmp_path / "step=10.ckpt") == uninterrupted[10:]

    def test_stream_is_shuffled_within_windows(self, make):
        def blocks(**options):
            loader = iter(make(**self.arguments | options).train_dataloader())
            return torch.cat([next(loader)["input_ids"] for _ in range(6)]).tolist()

        in_order, shuffled, other_seed = blocks(), blocks(shuffle_blocks=11), blocks(shuffle_blocks=11, seed=1)
        for window in (slice(0, 12), slice(12, 24)):  # whole batches of 4
            assert sorted(shuffled[window]) == sorted(in_order[window])
            assert shuffled[window] != in_order[window]
        assert shuffled != other_seed
        assert shuffled == blocks(shuffle_blocks=11)

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"position": [0, 0]}, "2 ranks.* 1"),
            ({"position": [0], "stream": {"batch_size": 999}}, "batch_size: 999 .*4"),
            ({"position": 8}, "streaming=True"),
        ],
    )
    def test_checkpoint_of_other_settings_is_an_error(self, make, state, message):
        with pytest.raises(ValueError, match=message):
            make(**self.arguments).load_state_dict(state)

    def test_changed_corpus_is_an_error(self, make, corpus, tmp_path):
        copy = shutil.copytree(Path(corpus).parent, tmp_path / "copy")
        state = make(**self.arguments).state_dict()
        make(**self.arguments, source=str(copy / "*.jsonl")).load_state_dict(state)  # the same files in another folder
        (copy / "0.jsonl").unlink()
        changed = make(**self.arguments, source=str(copy / "*.jsonl"))
        with pytest.raises(ValueError, match=r"source: 3 files .*2 files"):
            changed.load_state_dict(state)

    @pytest.mark.parametrize(
        ("arguments", "message"), [({}, "max_val_blocks"), ({"max_val_blocks": 5, "max_bytes": 100}, "max_bytes=100")]
    )
    def test_wrong_arguments_are_an_error(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            Text(streaming=True, **arguments)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_a_validation_split(make, monkeypatch, tmp_path, streaming):
    def load_dataset(name, subset, *, split, revision, streaming):
        assert (name, subset, revision) == ("owner/name", "small", "v1")
        texts = {"train": sentences(50), "validation": ["held out " * 40] * 3}[split]
        dataset = datasets.Dataset.from_dict({"text": texts, "meta": [{"i": 0}] * len(texts)})
        return dataset.to_iterable_dataset() if streaming else dataset

    monkeypatch.setattr(hub, "check", lambda *args: "v1")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    module = make(
        source="owner/name",
        subset="small",
        revision="v1",
        val_split="validation",
        streaming=streaming,
        shuffle_blocks=0,
        max_val_blocks=2,
        cache_dir=str(tmp_path),
    )
    first = next(iter(module.train_dataloader()))["input_ids"]
    assert len(first) == 4
    assert module.tokenizer.decode(all_tokens(module.val_data)) == ("held out " * 40 + "<|endoftext|>") * 3
    if streaming:
        assert module.tokenizer.decode(first[0]).startswith("0: ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"context_length": 100_000}, ValueError, r"\d+ train tokens.* 100001"),
        ({"lane_tokens": 0}, ValueError, "lane_tokens=0 "),
        ({"val_fraction": 1e-6}, ValueError, r"0 validation tokens.*data\.val_fraction=0\.2"),
        ({"tokenizer": "bpe:256"}, ValueError, "'bpe:256'.* 257 "),
        ({"tokenizer": "bpe"}, ValueError, "bpe: needs a number"),
        ({"source": ["a.txt", "b.txt"]}, TypeError, "one name or pattern"),
        ({"split": "test"}, ValueError, "subset, split and revision"),
        ({"val_split": "validation"}, FileNotFoundError, "val_split 'validation'.*val_split=null"),
        ({"val_fraction": 1.5}, ValueError, r"val_fraction=1\.5 .*0 and 1"),
        ({"stateful": True, "streaming": True, "max_val_blocks": 1}, ValueError, "stateful=true .*streaming"),
        ({"context_length": 0}, ValueError, "context_length=0 .*1"),
        ({"max_val_blocks": 0}, ValueError, "max_val_blocks=0 .*1"),
        ({"source": "missing.txt"}, FileNotFoundError, r"source 'missing\.txt'"),
    ],
)
def test_wrong_arguments_are_an_error(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


def test_validation_text_must_not_be_training_text(make, corpus, monkeypatch):
    with pytest.raises(ValueError, match=r"val_split=.*source.*val_split=null"):
        make(val_split=corpus)
    monkeypatch.setattr(hub, "check", lambda *args: "v1")
    with pytest.raises(ValueError, match="val_split='train'"):
        Text("owner/name", val_split="train")


def test_batch_larger_than_the_data_is_an_error(make):
    with pytest.raises(ValueError, match="10000 x 1 ranks x 1 accumulated"):
        make(batch_size=10_000).train_dataloader()


def test_wrong_order_of_calls_is_an_error(corpus, tmp_path):
    module = Text(corpus, cache_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) and setup\(\)"):
        _ = module.vocab_size
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) .*setup\(\)"):
        module.setup()


class TestTokenizer:
    def test_tokenizer_from_a_folder(self, make, folder):
        module = make(tokenizer=str(folder))
        assert module.vocab_size == 300
        assert module.tokenizer.get_vocab() == tokenization.load(str(folder)).get_vocab()

    def test_trained_tokenizer_reproduces_any_text(self, folder):
        tokenizer = tokenization.load(str(folder))
        text = "ungesehen: \t\x00 ∂ 🙃"
        (ids,) = Encoder(tokenizer).ids([text])
        assert tokenizer.decode(ids) == text

    def test_spelled_out_end_of_text_is_not_a_special_token(self, folder):
        tokenizer = tokenization.load(str(folder))
        (ids,) = Encoder(tokenizer).ids(["a <|endoftext|> b"])
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.eos_token_id in tokenizer("a <|endoftext|> b")["input_ids"]  # prompts may use it

    def test_saved_truncation_is_ignored(self, folder):
        tokenizer = tokenization.load(str(folder))
        tokenizer.backend_tokenizer.enable_truncation(3)
        (ids,) = Encoder(tokenizer).ids([sentences(1)[0]])
        assert len(ids) > 30

    def test_slow_tokenizer_is_supported(self):
        tokenizer = transformers.ByT5Tokenizer()
        assert Encoder(tokenizer).ids(["ab"]) == [[100, 101]]
        assert Encoder(tokenizer).vocab_size == len(tokenizer)

    def test_folder_without_vocabulary_is_an_error(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        with pytest.raises(ValueError, match=str(tmp_path)):
            tokenization.load(str(tmp_path))

    def test_code_in_a_tokenizer_folder_is_not_run(self, folder, tmp_path, monkeypatch):
        shutil.copytree(folder, tmp_path / "exported")
        config = {"model_type": "of_somebody", "auto_map": {"AutoConfig": "code.Config"}}
        (tmp_path / "exported" / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"a training waits for an answer: {prompt}"))
        assert len(tokenization.load(str(tmp_path / "exported"))) == 300

    def test_empty_folder_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match=rf"{tmp_path}.*save_pretrained\(\)"):
            tokenization.load(str(tmp_path))

    def test_too_small_corpus_for_the_vocabulary_causes_a_warning(self):
        with pytest.warns(UserWarning, match=r"bpe:300 .*2\d\d tokens"):
            tokenization.train(["abc"], 300)

    def test_tokenizer_without_end_of_text_is_an_error(self, tmp_path):
        tokenizer = tokenization.train(sentences(5), 300)
        tokenizer.eos_token = None
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"{tmp_path}.*end-of-text"):
            tokenization.load(str(tmp_path))

    def test_tokenizer_that_is_not_downloaded_is_an_error_offline(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match=r"'owner/name' .*HF_HUB_OFFLINE"):
            tokenization.load("owner/name")

    def test_missing_network_is_an_error(self, monkeypatch):
        def fail(*args, **kwargs):
            raise OSError("Name or service not known")

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
        with pytest.raises(ConnectionError, match="'owner/name'"):
            tokenization.load("owner/name")
