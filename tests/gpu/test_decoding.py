"""Steps of a language model in one launch: compared with float64, and the generated text."""

import copy
from functools import partial

import pytest
import torch

from flashrnn import decoding
from flashrnn.accuracy import BOUNDS, relative_error
from flashrnn.cuda import build as compiler
from flashrnn.decoding import free_cublas_workspaces
from models import fused_blocks
from models.backbone import SequenceModel
from models.generation.fused_step import compile_ahead, fused_step
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from models.mixers import RNNMixer
from models.quantization import quantize


def build(function, heads, d, dtype, classes=1001, kind=SequenceModel):
    torch.manual_seed(0)
    if kind is SequenceModel:
        mixer = partial(RNNMixer, function=function, num_heads=heads)
        model = SequenceModel(classes, mixer, d_model=d, num_blocks=2)
    else:
        mixer = {"name": "RNNMixer", "function": function}
        config = FlashRNNConfig(vocab_size=classes, d_model=d, num_blocks=2, num_heads=heads, mixer=mixer)
        model = FlashRNNForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=parameter.shape[-1] ** -0.5)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize(
    ("function", "heads", "d", "dtype", "batch"),
    [
        ("lstm", 12, 768, torch.bfloat16, 1),
        ("lstm", 1, 768, torch.bfloat16, 3),
        ("slstm", 12, 768, torch.float16, 16),
        ("gru", 4, 256, torch.float32, 7),
        ("lstm", 12, 768, torch.float32, 8),
        ("elman", 2, 1024, torch.bfloat16, 9),
        ("lstm", 12, 768, torch.bfloat16, 64),
        ("lstm", 1, 768, torch.bfloat16, 17),
        ("slstm", 12, 768, torch.float16, 33),
        ("gru", 8, 1024, torch.bfloat16, 50),
        ("layernorm_lstm", 12, 768, torch.bfloat16, 1),
        ("layernorm_lstm", 1, 768, torch.float16, 64),
        ("layernorm_gru", 4, 256, torch.float32, 5),
        ("layernorm_gru", 12, 768, torch.bfloat16, 20),
    ],
)
def test_steps_equal_float64(function, heads, d, dtype, batch):
    model = build(function, heads, d, dtype)
    exact = build(function, heads, d, dtype).double()
    with torch.inference_mode():
        logits, states = model.read(torch.randint(1001, (batch, 5), device="cuda"))
        of_exact = [tuple(part.double() for part in state) for state in states]
        step, tokens = fused_step(model, states), logits.argmax(-1)
        assert step is not None
        for _ in range(3):
            chosen, logits = torch.empty_like(tokens), torch.empty_like(logits)
            step(tokens, logits, chosen)
            expected, of_exact = exact(tokens[:, None], of_exact, return_states=True)
            assert relative_error(logits, expected[:, 0]) < BOUNDS[dtype]
            assert torch.equal(chosen, logits.float().argmax(-1))
            tokens = chosen
    for state, last in zip(states, of_exact, strict=True):
        assert relative_error(state[0], last[0]) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("function", "heads", "dtype", "batch"),
    [
        ("lstm", 12, torch.bfloat16, 1),
        ("slstm", 1, torch.float16, 8),
        ("gru", 12, torch.float32, 2),
        ("layernorm_lstm", 12, torch.bfloat16, 64),
    ],
)
def test_steps_with_8_bit_weights_equal_float64(function, heads, dtype, batch):
    model = build(function, heads, 768, dtype)
    quantize(model)
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        _, states = model.read(torch.randint(1001, (batch, 5), device="cuda"))
        of_exact = [tuple(part.double() for part in state) for state in states]
        tokens, logits = torch.arange(batch, device="cuda"), torch.empty(batch, 1001, device="cuda", dtype=dtype)
        fused_step(model, states)(tokens, logits)
        expected, of_exact = exact(tokens[:, None], of_exact, return_states=True)
    assert relative_error(logits, expected[:, 0]) < BOUNDS[dtype]
    for state, last in zip(states, of_exact, strict=True):
        assert relative_error(state[0], last[0]) < BOUNDS[dtype]


@pytest.mark.parametrize("function", ["lstm", "slstm", "gru"])
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_tokens_in_float32_equal_transformers(function, batch):
    model = build(function, 4, 256, torch.float32, kind=FlashRNNForCausalLM)
    ids = torch.randint(1, 1001, (batch, 9), device="cuda")
    mask = torch.ones_like(ids)
    mask[-1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **options)
    hook = model.model.register_forward_hook(lambda *_: None)  # a Decoder does not support hooks
    expected = model.generate(ids, **options)
    hook.remove()
    assert torch.equal(found, expected)


def test_sampled_text_depends_only_on_the_seed():
    """Operators draw the tokens of 40 sequences, and the kernel those of a few."""
    model = build("lstm", 4, 256, torch.float32, kind=FlashRNNForCausalLM)
    ids = torch.randint(1, 1001, (40, 9), device="cuda")
    texts = []
    for rows in (ids, ids[:3], ids[:1]):
        torch.manual_seed(0)
        texts.append(model.generate(rows, do_sample=True, top_k=0, max_new_tokens=40, pad_token_id=0))
    assert torch.equal(texts[0][:3], texts[1])
    assert torch.equal(texts[0][:1], texts[2])


def test_kernels_of_the_first_tokens_are_compiled_ahead(monkeypatch, tmp_path):
    entries, compiling = [], compiler._compile
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", lambda *program: entries.append(program[1]) or compiling(*program))
    monkeypatch.setattr(decoding, "start_in_background", lambda *functions: [function() for function in functions])
    model = build("lstm", 3, 384, torch.bfloat16)
    compile_ahead(model, 1)
    assert sorted(entries) == ["flashrnn_add_norm", "flashrnn_step"]
    with torch.inference_mode():
        _, states = model.read(torch.zeros(1, 3, dtype=torch.int64, device="cuda"))
        assert fused_step(model, states) is not None
    assert sorted(entries) == ["flashrnn_add_norm", "flashrnn_forward", "flashrnn_step"]


def test_unsupported_models_have_no_fused_step():
    model = build("lstm", 4, 1152, torch.float32)
    with torch.inference_mode():
        _, states = model.read(torch.zeros(1, 3, dtype=torch.int64, device="cuda"))
    assert fused_step(model, states) is None


@pytest.mark.parametrize(("function", "heads", "dtype"), [("lstm", 4, torch.bfloat16), ("gru", 1, torch.float32)])
def test_logits_of_prompts_equal_float64(function, heads, dtype):
    """The number of logits is not a multiple of eight, and there is a reset."""
    model, exact = build(function, heads, 256, dtype), build(function, heads, 256, dtype).double()
    ids, reset = torch.randint(1001, (3, 40), device="cuda"), torch.zeros(3, 40, dtype=torch.bool, device="cuda")
    reset[1, 7] = True
    with torch.inference_mode():
        assert fused_blocks.served(model)
        logits, states = model.read(ids, reset=reset)
        expected, of_exact = exact.read(ids, reset=reset)
    assert relative_error(logits, expected) < BOUNDS[dtype]
    for state, last in zip(states, of_exact, strict=True):
        assert relative_error(state[0], last[0]) < BOUNDS[dtype]


@pytest.mark.parametrize("length", [77, 1024, 1500])
def test_logits_of_prompts_by_cuda_graphs_equal_float64(length):
    """The first call runs without a graph, the second one captures it; also after other tokens."""
    model = build("lstm", 4, 256, torch.float32, kind=FlashRNNForCausalLM)
    exact, ids = copy.deepcopy(model).double().model, torch.randint(1001, (1, length), device="cuda")
    with torch.no_grad():
        expected, of_exact = exact.read(ids)
        for _ in range(3):
            logits, states = model._prompt_reader.read(model.model, ids, None, None)
            assert relative_error(logits, expected) < BOUNDS[torch.float32]
        assert all(model._prompt_reader._graphs.values())
        expected, _ = exact.read(ids, of_exact)
        for _ in range(3):
            logits, _ = model._prompt_reader.read(model.model, ids, states, None)
            assert relative_error(logits, expected) < BOUNDS[torch.float32]


def test_texts_of_a_large_batch_equal_transformers():
    model = build("lstm", 4, 256, torch.float32, kind=FlashRNNForCausalLM)
    ids = torch.randint(1, 1001, (40, 9), device="cuda")
    found = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    hook = model.model.register_forward_hook(lambda *_: None)  # a Decoder does not support hooks
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    hook.remove()
    assert torch.equal(found, expected)


def test_memory_does_not_grow_with_the_prompt():
    model = build("lstm", 4, 256, torch.bfloat16, kind=FlashRNNForCausalLM)
    peaks = []
    for length in (1, 1024, 16384):  # the first call includes what a process allocates once
        ids = torch.randint(1, 1001, (1, length), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] < 1.3 * peaks[1] + 8 * ids.nbytes  # masks, and copies of the prompt


@pytest.mark.parametrize(("batches", "streams"), [((1, 1, 1), 1), ((70, 1, 130, 200), 3)])
def test_streams_share_cublas_workspaces(batches, streams):
    """Prompts and warm-ups share one stream, captures another one, besides the caller's.

    The workspace of a further stream would never be freed.
    """
    model = build("lstm", 4, 256, torch.bfloat16, kind=FlashRNNForCausalLM)
    free_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    for batch in batches:
        ids = torch.randint(1, 1001, (batch, 128), device="cuda")
        model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.cuda.memory_allocated() - before < (streams + 0.5) * 2**25  # 32 MiB each on Hopper


def workspaces():
    """Return pool and address of all blocks at least as large as a cuBLAS workspace on Hopper."""
    return {
        (tuple(segment["segment_pool_id"]), block["address"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["size"] >= 2**25
    }


def test_cuda_graphs_have_their_own_workspaces():
    """PyTorch's compiler frees workspaces outside of graph pools, and their memory is then reused."""
    model = build("lstm", 12, 768, torch.bfloat16, kind=FlashRNNForCausalLM)
    ids = torch.randint(1, 1001, (1, 1024), device="cuda")
    free_cublas_workspaces()
    before = workspaces()
    for _ in range(2):  # the first call is not captured
        model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    pools = {pool for pool, _ in workspaces() - before}
    assert len(pools) == 1
    assert (0, 0) not in pools
