"""A step of a language model in one launch, on the processor, compared with float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from flashrnn import decoding, flashrnn, get_cell
from flashrnn.accuracy import BOUNDS, relative_error
from flashrnn.cuda.decoding import step
from flashrnn.cuda.decoding import tiling as tilings
from flashrnn.cuda.decoding.tiling import THREADS, ModelSpec, shared_bytes, tiling, unsupported_sizes
from flashrnn.cuda.spec import KernelSpec
from flashrnn.decoding import ModelStep, ResidualBlock, ResidualModel
from flashrnn.gpu import named_gpu
from models.generation.sampler import Sampler, SamplingParams
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.problems import PEEPHOLE_LSTM

LSTM, GRU, SLSTM = map(get_cell, ("lstm", "gru", "slstm"))
LAYERNORM_LSTM, LAYERNORM_GRU = map(get_cell, ("layernorm_lstm", "layernorm_gru"))
H100 = named_gpu("H100")
TENSORS = ("mixer_norm", "R", "b", "head_norm", "mlp_norm")  # fields of a ResidualBlock, without matrices and states


@pytest.fixture
def on_host(monkeypatch):
    """Return a function that lets ModelStep run on the processor with this number of thread blocks."""

    def use(blocks: int) -> None:
        gpu = replace(H100, multiprocessors=blocks)

        def load_step(spec, device):
            layout, parameters = tiling(spec), step.parameters(spec)
            source = step.prelude(spec, layout)
            header, entry = step.header_and_entry(layout)
            library = compile_for_host(entry, source, header)
            kernel = HostKernel(library, parameters, None, THREADS, shared_bytes(spec, layout))
            return kernel.launch, blocks

        monkeypatch.setattr(decoding, "load_step", load_step)
        monkeypatch.setattr(decoding, "device_gpu", lambda index: gpu)

    return use


def random_model(cell, heads, head_dim, blocks, batch, dtype, classes=37, vocabulary=11, int8=False) -> ResidualModel:
    """Return a model whose tensors share one storage, which a `HostKernel` copies at once."""
    d, S, G = heads * head_dim, len(cell.states), len(cell.gates)
    shapes = ResidualBlock(
        mixer_norm=(d,),
        gates=(len(cell.input_gates) * d, d),
        R=(len(cell.recurrent_gates), heads, head_dim, head_dim),
        b=(G, heads, head_dim),
        head_norm=(d,),
        mlp_norm=(d,),
        up=(2 * d, d),
        down=(d, 2 * d),
        states=(S, batch, heads, head_dim),
    )
    generator = torch.Generator().manual_seed(0)
    memory, taken = torch.zeros(2**23, dtype=torch.uint8), 0

    def tensor(*shape: int, dtype=dtype, norm=False) -> torch.Tensor:
        size = 0.3 if norm else shape[-1] ** -0.5
        return placed(size * torch.randn(shape, generator=generator) + norm, dtype)

    def placed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal taken
        part = memory[taken:][: values.numel() * dtype.itemsize].view(dtype).view(values.shape)
        taken += -(-part.nbytes // 16) * 16
        return part.copy_(values)

    def matrix(name: str, *shape: int) -> dict[str, torch.Tensor]:
        if not int8:
            return {name: tensor(*shape)}
        values = torch.randint(-127, 128, shape, generator=generator)
        scale = (0.5 + torch.rand(shape[0], generator=generator)) / (70 * shape[1] ** 0.5)
        return {name: placed(values, torch.int8), f"{name}_scale": placed(scale, torch.float32)}

    embedding = tensor(vocabulary, d)
    of_blocks = []
    for _ in range(blocks):
        weights = {name: tensor(*getattr(shapes, name), norm="norm" in name) for name in TENSORS}
        for name in ("gates", "up", "down"):
            weights |= matrix(name, *getattr(shapes, name))
        states = tensor(*shapes.states, dtype=torch.float32)
        states[0] = states[0].to(dtype)
        of_blocks.append(ResidualBlock(**weights, states=states.abs_() if cell is SLSTM else states))
    return ResidualModel(cell, embedding, of_blocks, norm=tensor(d, norm=True), **matrix("head", classes, d))


def expected(model, tokens):
    """Return logits and new states, computed in float64."""
    x, states = model.embedding.double()[tokens], []
    for block in model.blocks:
        _, B, N, D = block.states.shape
        w = ResidualBlock(*(part if part is None else part.double() for part in block))
        gates, up, down = (scaled(*pair) for pair in zip((w.gates, w.up, w.down), w[-3:], strict=True))
        Wx = F.layer_norm(x, (N * D,), w.mixer_norm) @ gates.T
        h, last = flashrnn(Wx.view(B, 1, -1, N, D), w.R, w.b, w.states, model.cell, "vanilla")
        x = x + F.layer_norm(h[:, 0], (D,)).flatten(1) * w.head_norm
        x = x + F.gelu(F.layer_norm(x, (N * D,), w.mlp_norm) @ up.T) @ down.T
        states.append(last)
    return F.layer_norm(x, x.shape[1:], model.norm.double()) @ scaled(model.head.double(), model.head_scale).T, states


def scaled(weight, scale):
    return weight if scale is None else weight * scale.double()[:, None]


@pytest.mark.parametrize(
    ("cell", "heads", "head_dim", "batch", "dtype", "blocks", "slots", "steps"),
    [
        # more tiles of units than thread blocks; a batch that does not fill a tile
        pytest.param(LSTM, 2, 32, 3, torch.bfloat16, 3, 24, 2, marks=pytest.mark.slow),
        # fewer tiles, so that some blocks have none
        pytest.param(SLSTM, 1, 32, 5, torch.float16, 4, 7, 1, marks=pytest.mark.slow),
        pytest.param(PEEPHOLE_LSTM, 1, 32, 8, torch.bfloat16, 2, 8, 1, marks=pytest.mark.slow),
        # several warps normalise a row with two heads
        pytest.param(GRU, 2, 128, 1, torch.float16, 3, 8, 1, marks=pytest.mark.slow),
        # the same with one head; a block normalises several sequences; a batch that does not fill a tile
        pytest.param(LSTM, 1, 256, 17, torch.bfloat16, 4, 6, 1, marks=pytest.mark.slow),
        # cells with reductions over units of several blocks; as few slots as possible
        (LAYERNORM_GRU, 2, 16, 3, torch.float32, 4, 4, 1),
        pytest.param(LAYERNORM_LSTM, 1, 32, 5, torch.bfloat16, 4, 24, 2, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_float64(on_host, monkeypatch, cell, heads, head_dim, batch, dtype, blocks, slots, steps):
    on_host(blocks)
    monkeypatch.setattr(tilings, "_MOST_SLOTS", slots)
    check_steps(random_model(cell, heads, head_dim, 2, batch, dtype), steps)


@pytest.mark.parametrize(
    ("cell", "heads", "head_dim", "batch", "dtype"),
    [
        (LSTM, 2, 16, 2, torch.float32),
        pytest.param(SLSTM, 1, 64, 3, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_steps_with_8_bit_weights_equal_float64(on_host, cell, heads, head_dim, batch, dtype):
    on_host(3)
    check_steps(random_model(cell, heads, head_dim, 2, batch, dtype, int8=True))


def check_steps(model: ResidualModel, steps: int = 1) -> None:
    """Compare steps with float64, each from the states and tokens of the kernel."""
    assert unsupported_sizes(model.spec) is None
    dtype, batch = model.embedding.dtype, model.blocks[0].states.shape[1]
    run, tokens = ModelStep(model), torch.arange(batch) % len(model.embedding)
    for _ in range(steps):
        logits, chosen = torch.empty(batch, len(model.head), dtype=dtype), torch.empty_like(tokens)
        wanted, states = expected(model, tokens)
        run(tokens, logits, chosen)
        assert relative_error(logits, wanted) < BOUNDS[dtype]
        for block, last in zip(model.blocks, states, strict=True):
            assert relative_error(block.states, last) < BOUNDS[dtype]
        assert torch.equal(chosen, logits.float().argmax(-1))
        tokens = chosen % len(model.embedding)


@pytest.mark.slow
def test_drawn_tokens_equal_those_of_a_sampler(on_host):
    """Given the same logits and keys."""
    on_host(3)
    model, batch = random_model(LSTM, 2, 16, 1, 8, torch.float32), 8
    run, tokens = ModelStep(model), torch.arange(batch)
    sampler = Sampler(SamplingParams(sample=True, temperature=0.7), batch, len(model.head), torch.device("cpu"))
    sampler.begin(range(batch), None)
    keys, temperature = sampler.keys[:, 0].clone(), torch.tensor([0.7])
    for _ in range(3):
        logits, chosen = torch.empty(batch, len(model.head)), torch.empty_like(tokens)
        run(tokens, logits, chosen, keys=keys, temperature=temperature)
        assert torch.equal(chosen, sampler(logits))
        assert torch.equal(keys, sampler.keys[:, 0])
        tokens = chosen % len(model.embedding)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(12, 64, torch.bfloat16), (1, 768, torch.float16)])
def test_no_register_spills_for_models_of_160_million_parameters(heads, head_dim, dtype):
    kernel = KernelSpec("forward", LSTM, heads, head_dim, 1, dtype, H100)
    binary, _ = step.compile_step(ModelSpec(kernel, blocks=12, hidden=4 * heads * head_dim, classes=50257))
    assert binary.spilled <= 64


@pytest.mark.parametrize(
    ("heads", "head_dim", "batch", "gpu", "reason"),
    [
        (12, 60, 1, "H100", "multiple of 32"),
        (7, 64, 1, "H100", "power of two"),
        (12, 64, 65, "H100", "a batch of 65"),
        (1, 2048, 1, "H100", "the width 2048"),
        (12, 64, 1, "A100", "9.0"),
    ],
)
def test_reasons_for_unsupported_models(heads, head_dim, batch, gpu, reason):
    kernel = KernelSpec("forward", LSTM, heads, head_dim, batch, torch.bfloat16, named_gpu(gpu))
    assert reason in unsupported_sizes(ModelSpec(kernel, 12, 4 * heads * head_dim, 50257))
