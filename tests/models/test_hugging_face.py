"""SequenceModel as a transformers model: saving, loading, forward and generation."""

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM, StateCache

MIXERS = {
    "lstm": {"name": "RNNMixer", "function": "lstm", "num_heads": 2},
    "slstm": {"name": "RNNMixer", "function": "slstm", "num_heads": 2, "conv_width": 4},
    "transformer": {"name": "AttentionMixer", "num_heads": 2},
    "mlstm": {"name": "mlstm.MLSTMMixer", "num_heads": 2},
    "mamba": {"name": "mamba.MambaMixer"},
    "hybrid": {  # mixers by their names in the pattern
        "slstm": {"name": "RNNMixer", "function": "slstm", "num_heads": 2},
        "window": {"name": "AttentionMixer", "num_heads": 2, "window": 5, "rope_base": None},
    },
}
VOCABULARY = 20


def build(mixer):
    torch.manual_seed(0)
    pattern = None if "name" in mixer else list(mixer)
    config = FlashRNNConfig(vocab_size=VOCABULARY, d_model=16, num_blocks=2, mixer=mixer, pattern=pattern)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # so that the likeliest token depends on the whole text
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(params=MIXERS)
def model(request):
    return build(MIXERS[request.param])


@pytest.fixture
def lstm():
    return build(MIXERS["lstm"])


def tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def greedy(model, ids, number):
    """Return greedy tokens, computed without cache and without generate()."""
    for _ in range(number):
        ids = torch.cat((ids, model.model(ids)[:, -1:].argmax(-1)), dim=1)
    return ids


class TestSaved:
    def test_loaded_model_has_the_same_logits(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = tokens(2, 7)
        assert torch.equal(loaded(ids).logits, model.model(ids))
        assert isinstance(AutoConfig.from_pretrained(tmp_path), FlashRNNConfig)

    def test_push_to_hub_uploads_the_code(self, lstm, monkeypatch):
        """Checks the files of the commit, without a hub."""
        committed = {}

        class Hub:
            def create_repo(self, repo_id, **options):
                return SimpleNamespace(repo_id=repo_id)

            def create_commit(self, repo_id, operations, **options):
                committed[repo_id] = {operation.path_in_repo for operation in operations}

            def create_branch(self, **options):
                raise AssertionError("nobody asked for a branch")

        monkeypatch.setattr("transformers.utils.hub.hf_api", Hub)
        monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: ModelCard("lstm"))
        lstm.push_to_hub("somebody/lstm")
        assert {"config.json", "model.safetensors", "modeling_flashrnn.py"} <= committed["somebody/lstm"]

    def test_loads_in_bfloat16(self, lstm, tmp_path):
        lstm.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        logits, right = loaded(tokens(2, 7)).logits, lstm(tokens(2, 7)).logits
        assert logits.dtype == torch.bfloat16
        assert (logits - right).norm() / right.norm() < 0.05

    def test_embeddings_can_be_resized(self, lstm, tmp_path):
        """Logits of old tokens do not change, and new ones are saved and loaded."""
        before = lstm(tokens(2, 7)).logits
        lstm.resize_token_embeddings(VOCABULARY + 3)
        lstm.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(tokens(2, 7)).logits[..., :VOCABULARY], before)
        assert loaded(torch.tensor([[VOCABULARY + 2]])).logits.shape == (1, 1, VOCABULARY + 3)
        assert torch.equal(loaded(tokens(2, 7)).logits, lstm(tokens(2, 7)).logits)

    def test_pickled_weights_are_an_error(self, lstm, tmp_path):
        lstm.config.save_pretrained(tmp_path)
        torch.save(lstm.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    def test_missing_weights_are_an_error(self, lstm, tmp_path):
        state = lstm.state_dict()
        del state["model.blocks.1.mixer.recurrence.R"]
        lstm.save_pretrained(tmp_path, state_dict=state)
        with pytest.raises(ValueError, match=r"missing_keys': \['model.blocks.1.mixer.recurrence.R'\]"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "name", ["LSTMMixer", "nn.Linear", "mamba.MambaConfig", "mamba.MambaLayer", "os.system", ""]
    )
    def test_config_can_only_name_mixers(self, name):
        with pytest.raises(ValueError, match=f"'{name}'"):
            FlashRNNForCausalLM(FlashRNNConfig(mixer={"name": name}))


class TestForward:
    def test_loss_predicts_the_next_token(self, lstm):
        ids = tokens(2, 7)
        expected = F.cross_entropy(lstm.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert lstm(ids, labels=ids).loss.item() == pytest.approx(expected.item())

    def test_logits_of_only_the_last_positions(self, lstm):
        ids = tokens(2, 7)
        assert torch.equal(lstm(ids, logits_to_keep=2).logits, lstm(ids).logits[:, -2:])
        assert torch.equal(lstm(ids, logits_to_keep=torch.tensor([0, 3])).logits, lstm(ids).logits[:, [0, 3]])

    def test_hidden_states_are_returned_on_request(self, lstm):
        ids = tokens(2, 7)
        out = lstm(ids, output_hidden_states=True)
        assert len(out.hidden_states) == lstm.config.num_hidden_layers + 1
        assert torch.equal(out.hidden_states[0], lstm.model.embedding(ids))
        assert torch.equal(lstm.model.head(out.hidden_states[-1]), out.logits)
        assert lstm(ids).hidden_states is None

    def test_pieces_with_a_cache_equal_the_whole(self, model):
        ids = tokens(2, 9)
        with torch.no_grad():
            first = model(ids[:, :4])
            second = model(ids[:, 4:], past_key_values=first.past_key_values)
            torch.testing.assert_close(second.logits, model(ids).logits[:, 4:], rtol=1e-4, atol=1e-4)

    def test_left_padding_does_not_affect_results(self, model):
        ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
        mask[1, :5] = 0
        with torch.no_grad():
            found = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(found[:1], model(ids[:1]).logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found[1:, 5:], model(ids[1:, 5:]).logits, rtol=1e-4, atol=1e-4)

    def test_right_padding_does_not_affect_earlier_tokens(self, lstm):
        ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
        mask[1, 5:] = 0
        assert torch.equal(lstm(ids, attention_mask=mask).logits, lstm(ids).logits)

    @pytest.mark.parametrize("name", ["NNLSTMMixer", "mamba.MambaMixer"])
    def test_right_padding_works_for_all_mixers(self, name):
        """It needs no reset, because nothing follows it."""
        ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
        mask[1, 5:] = 0
        model = build({"name": name}).train()
        assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)

    def test_continuing_after_right_padding_is_an_error(self, lstm):
        mask = torch.tensor([[1, 1, 0]])
        cache = lstm(tokens(1, 3), attention_mask=mask).past_key_values
        with pytest.raises(ValueError, match=r"tokenizer\.padding_side"):
            lstm(tokens(1, 1), attention_mask=F.pad(mask, (0, 1), value=1), past_key_values=cache)

    def test_mask_of_wrong_length_is_an_error(self, lstm):
        with pytest.raises(ValueError, match=r"\[1, 4\]: expected \[batch, 3\]"):
            lstm(tokens(1, 3), attention_mask=torch.ones(1, 4))

    def test_training_creates_no_cache(self, lstm):
        assert lstm.train()(tokens(1, 3)).past_key_values is None


class TestGenerate:
    def test_greedy_tokens_equal_those_without_generate(self, model):
        ids = tokens(3, 5)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), greedy(model, ids, 8))

    def test_sampling_from_one_token_is_greedy(self, lstm):
        ids = tokens(3, 5)
        sampled = lstm.generate(ids, max_new_tokens=8, do_sample=True, top_k=1)
        assert torch.equal(sampled, greedy(lstm, ids, 8))

    def test_beam_search_reorders_states(self, model):
        options = {"max_new_tokens": 8, "num_beams": 4, "do_sample": False}
        ids = tokens(3, 5)
        found = model.generate(ids, **options)
        assert torch.equal(found, model.generate(ids, use_cache=False, **options))

    def test_padded_batch_equals_single_prompts(self, model):
        prompts = [tokens(1, length) for length in (2, 6, 4)]
        ids = torch.cat([F.pad(prompt, (6 - prompt.shape[1], 0), value=3) for prompt in prompts])
        mask = torch.cat([F.pad(torch.ones_like(prompt), (6 - prompt.shape[1], 0)) for prompt in prompts])
        found = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for row, prompt in zip(found, prompts, strict=True):
            assert torch.equal(row[6 - prompt.shape[1] :], greedy(model, prompt, 5)[0])

    def test_generation_continues_from_a_cache(self, lstm):
        ids = tokens(1, 5)
        first = lstm.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        more = lstm.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
        assert torch.equal(more, greedy(lstm, ids, 8))

    def test_long_prompt_is_read_in_pieces(self, lstm):
        options = {"past_key_values": StateCache(), "prefill_chunk_size": 3, "max_new_tokens": 5, "do_sample": False}
        ids = tokens(2, 8)
        assert torch.equal(lstm.generate(ids, **options), greedy(lstm, ids, 5))

    @pytest.mark.parametrize(("name", "growth"), [("lstm", 1), ("mamba", 1), ("transformer", 10)])
    def test_size_of_the_cache(self, name, growth):
        model = build(MIXERS[name])
        short, long = (model(tokens(1, length)).past_key_values for length in (10, 100))
        positions = 2 * 8 * (growth - 1)  # one for each block of attention
        assert long.nbytes == growth * short.nbytes - positions
        assert (short.get_seq_length(), long.get_seq_length()) == (10, 100)

    def test_assisted_generation_is_an_error(self, lstm):
        with pytest.raises(ValueError, match="assisted"):
            lstm.generate(tokens(1, 3), assistant_model=lstm, max_new_tokens=4)


def test_only_language_models_have_a_config():
    with pytest.raises(ValueError, match=r"2 .*3"):
        FlashRNNConfig.from_hydra({"vocab_size": 3, "num_classes": 2})


def test_cache_can_be_repeated_selected_and_reset(lstm):
    ids = tokens(2, 5)
    with torch.no_grad():
        cache = lstm(ids, use_cache=True).past_key_values
        expected = lstm(torch.cat([ids, tokens(2, 1)], dim=1)).logits[1:, -1]
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([4]))
        torch.testing.assert_close(lstm(tokens(2, 1)[1:], past_key_values=cache).logits[:, 0], expected)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    with pytest.raises(ValueError, match="2 tokens"):
        cache.crop(2)


def test_cache_without_states_has_no_bytes():
    assert StateCache().nbytes == 0


def test_model_without_mlp_can_be_saved_and_loaded(tmp_path):
    mixer = {"_target_": "models.mixers.RNNMixer", "_partial_": True, "function": "lstm", "backend": "auto"}
    sizes = {"vocab_size": 11, "num_classes": 11, "d_model": 16, "num_blocks": 1, "num_heads": 2}
    FlashRNNConfig.from_hydra({**sizes, "mlp": False, "mixer": mixer}).save_pretrained(tmp_path)
    assert FlashRNNConfig.from_pretrained(tmp_path).build().blocks[0].mlp is None


def test_config_does_not_import_modules(tmp_path, monkeypatch):
    (tmp_path / "cell_of_somebody.py").write_text("from flashrnn.cells import GRU as CELL")
    monkeypatch.syspath_prepend(tmp_path)
    mixer = {"name": "RNNMixer", "function": "cell_of_somebody.CELL"}
    config = FlashRNNConfig(vocab_size=11, d_model=16, num_blocks=1, num_heads=2, mixer=mixer)
    with pytest.raises(ValueError, match=r"import cell_of_somebody"):
        config.build()
    assert config.import_cells().build().blocks[0].mixer.recurrence.cell.name == "gru"


def test_inputs_embeds_are_an_error(lstm):
    with pytest.raises(ValueError, match="inputs_embeds"):
        lstm(inputs_embeds=lstm.get_input_embeddings()(tokens(1, 3)))
