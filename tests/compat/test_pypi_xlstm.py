"""sLSTM blocks of xlstm 2.0.6 with the kernel of docs/moving_over.md, compared with the package's loop in PyTorch."""

import importlib
import re

import pytest
import torch

from tests.docs.pages import PAGES
from tests.tolerances import assert_close
from training.xlstm_checkpoint import import_layers, read

d, HEADS = 24, 3


@pytest.fixture(scope="module")
def kernel(xlstm, tmp_path_factory):
    """Return the module of the page, imported like by a reader."""
    file = tmp_path_factory.mktemp("page") / "slstm_kernel.py"
    page = PAGES["docs/moving_over.md"].read_text()
    file.write_text(re.search(r'^```python title="slstm_kernel\.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        yield importlib.import_module(file.stem)


def block(xlstm, backend, function):
    return xlstm.sLSTMBlock(
        xlstm.sLSTMBlockConfig(
            slstm=xlstm.sLSTMLayerConfig(
                embedding_dim=d, num_heads=HEADS, backend=backend, function=function, dtype="float32"
            ),
            feedforward=xlstm.FeedForwardConfig(proj_factor=1.3),
            _num_blocks=2,
            _block_idx=0,
        )
    )


def moved(values, source, target):
    """Return values by parameter name, converted from the layout of `source`'s backend to that of `target`'s."""
    source, target = source.xlstm.slstm_cell, target.xlstm.slstm_cell
    values = dict(values)
    R, b = (f"xlstm.slstm_cell.{name}" for name in ("_recurrent_kernel_", "_bias_"))
    values[R] = target._recurrent_kernel_ext2int(source._recurrent_kernel_int2ext(values[R]))
    values[b] = target._bias_ext2int(source._bias_int2ext(values[b]))
    return values


@pytest.fixture(params=["slstm", "lstm"])
def blocks(request, xlstm, kernel):
    """Return a block of the package, and the same block with our kernel."""
    theirs, ours = (block(xlstm, backend, request.param) for backend in ("vanilla", "cuda"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3, generator=generator)
    ours.load_state_dict(moved(theirs.state_dict(), theirs, ours))
    assert isinstance(ours.xlstm.slstm_cell.func, kernel.Kernel)
    return theirs, ours


def test_outputs_and_gradients_of_a_block_are_equal(blocks):
    _, ours = blocks
    generator = torch.Generator().manual_seed(1)
    x, mix = torch.randn(2, 3, 17, d, generator=generator)
    results = []
    for model in blocks:
        model_x = x.clone().requires_grad_()
        y = model(model_x)
        y.backward(mix)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"y": y.detach(), "gradient of x": model_x.grad} | moved(gradients, model, ours))
    expected, out = results
    assert_close(out, expected, torch.float32)


def test_states_of_a_layer_and_continued_sequences_are_equal(blocks):
    x = torch.randn(3, 9, d, generator=torch.Generator().manual_seed(1))
    results = []
    for model in blocks:
        y, state = model.xlstm(x[:, :5], return_last_state=True)
        rest = model.xlstm(x[:, 5:], **state)
        results.append({"y": y, "state": state["slstm_state"], "rest": rest})
    expected, out = results
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("backend", ["vanilla", "cuda"])
def test_checkpoint_of_xlstm_can_be_imported(backend, xlstm, kernel, tmp_path):
    """A state_dict of a whole stack, in the layouts of both of the package's backends."""
    layer = xlstm.sLSTMLayerConfig(num_heads=HEADS, backend="vanilla", function="slstm", dtype="float32")
    config = xlstm.xLSTMBlockStackConfig(
        slstm_block=xlstm.sLSTMBlockConfig(slstm=layer), embedding_dim=d, num_blocks=2, slstm_at="all", dropout=0.0
    )
    stack = xlstm.xLSTMBlockStack(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(std=0.3, generator=generator)
    values = stack.state_dict()
    if backend == "cuda":
        for number, block_of_stack in enumerate(stack.blocks):
            own = {name: f"blocks.{number}.{name}" for name in block_of_stack.state_dict()}
            of_block = {name: values[full] for name, full in own.items()}
            converted = moved(of_block, block_of_stack, block(xlstm, "cuda", "slstm"))
            values |= {own[name]: value for name, value in converted.items()}
    torch.save(values, tmp_path / "xlstm.pt")

    layers = import_layers(read(tmp_path / "xlstm.pt"))
    assert list(layers) == ["blocks.0.xlstm", "blocks.1.xlstm"]
    x = torch.randn(3, 17, d, generator=generator)
    for name, mixer in layers.items():
        theirs = stack.get_submodule(name)
        assert_close({"y": mixer(x)[0]}, {"y": theirs(x)}, torch.float32)
