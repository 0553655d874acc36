from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from flashrnn import Cell, FlashRNN, dispatch, flashrnn, get_cell
from flashrnn.accuracy import relative_error
from flashrnn.dispatch import choose
from tests.problems import BUILT_IN, CELLS, LAYERNORM, MINIMAL_GATED, cell_name, random_inputs, random_reset, results
from tests.suite import allowing_tf32, tf32_on_the_processor
from tests.tolerances import assert_close

LSTM = get_cell("lstm")


def operator_arguments(cell, B=2, T=3, N=2, D=3, *, with_reset):
    Wx, R, b, states = random_inputs(cell, B, T, N, D)
    states = states.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    return Wx, R, b, states, random_reset(B, T) if with_reset else None


GATE_FORMATS = zip(BUILT_IN, ("GND", "NGD", "PNDG", "NDG"), strict=True)


@pytest.mark.parametrize(
    ("cell", "gate_format", "with_reset", "all_states"),
    [
        *((cell, gate_format, True, True) for cell, gate_format in GATE_FORMATS),
        pytest.param(LAYERNORM[0], "NDV+", True, True, marks=pytest.mark.slow),
        (LSTM, "PNDG", False, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_opcheck_forward(cell, gate_format, with_reset, all_states):
    """Checks schema, autograd registration and fake kernel, for inputs with swapped axes in memory; AOT dispatch too
    for h alone, because it takes most of the time and does not depend on the format of the gates."""
    Wx, R, b, states, reset = operator_arguments(cell, D=4, with_reset=with_reset)
    Wx = Wx.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += [] if all_states else ["test_aot_dispatch_dynamic"]
    arguments = Wx, R, b, states, reset, cell.key, "auto", all_states, True, gate_format
    torch.library.opcheck(torch.ops.flashrnn.forward, arguments, test_utils=checks)


@pytest.mark.parametrize("all_states", [False, True], ids=["h", "all states"])
def test_opcheck_forward_in_a_half_type(all_states):
    """Residuals have other dtypes than the inputs."""
    *inputs, states, _ = operator_arguments(LSTM, with_reset=False)
    Wx, R, b = (x.detach().to(torch.bfloat16) for x in inputs)
    in_float32 = b.float(), states.detach().float()
    arguments = (Wx.requires_grad_(), R, *in_float32, None, LSTM.key, "vanilla", all_states, True, "NDG")
    torch.library.opcheck(torch.ops.flashrnn.forward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_forward_without_states():
    arguments = [x.detach() for x in operator_arguments(LSTM, with_reset=False)[:4]]
    torch.library.opcheck(torch.ops.flashrnn.forward, (*arguments, None, LSTM.key, "vanilla", False, False, "GND"))


@pytest.mark.parametrize("cell", [LSTM, get_cell("gru")], ids=cell_name)
def test_opcheck_backward(cell):
    *inputs, reset = operator_arguments(cell, with_reset=True)
    inputs = [x.detach() for x in inputs]
    h, aux, last, gates = torch.ops.flashrnn.forward(*inputs, reset, cell.key, "auto", True, True, "NGD")
    _, R, b, states = inputs
    residual = (R, states, reset, h, aux, gates, "NGD")
    arguments = (torch.ones_like(h), None, torch.ones_like(last), *residual, cell.key, "auto", b)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")  # its autograd formula only raises an error
    torch.library.opcheck(torch.ops.flashrnn.backward, arguments, test_utils=tests)


class Network(torch.nn.Module):
    """A recurrent network between two linear layers."""

    def __init__(self, function, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = FlashRNN(5, 6, num_heads=2, function=function, batch_first=True, **options)
        self.head = torch.nn.Linear(12 if self.rnn.bidirectional else 6, 3)

    def forward(self, x, reset):
        out, states = self.rnn(torch.tanh(x), reset=reset)
        return self.head(out), states


def outputs_and_gradients(run, network: Network, x: torch.Tensor, reset) -> dict[str, torch.Tensor]:
    network.zero_grad()
    out, states = run(x, reset)
    states = torch.stack(states) if isinstance(states, tuple) else states
    (out.square().mean() + states.square().mean()).backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in network.named_parameters()}
    return {"out": out.detach(), "states": states.detach()} | gradients


@pytest.mark.parametrize(
    ("function", "options"),
    [("slstm", {"bidirectional": True}), (MINIMAL_GATED, {"num_layers": 2})],
    ids=["slstm", "minimal_gated"],
)
def test_compiled_network_gives_equal_results(function, options):
    torch.compiler.reset()
    model = Network(function, **options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for T in (7, 9):  # the second length makes the compiler use a dynamic length
        x, reset = torch.randn(3, T, 5, generator=torch.Generator().manual_seed(T)), random_reset(3, T)
        ref = outputs_and_gradients(model, model, x, reset)
        assert_close(outputs_and_gradients(compiled, model, x, reset), ref, torch.float32)


@pytest.mark.slow
def test_network_compiled_by_inductor_gives_equal_results():
    torch.compiler.reset()
    model = Network("lstm")
    x, reset = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)), random_reset(3, 7)
    ref = outputs_and_gradients(model, model, x, reset)
    from torch._inductor import config  # slow to import

    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False):  # only useful for larger networks
        compiled = torch.compile(model, fullgraph=True)
        found = outputs_and_gradients(compiled, model, x, reset)
    assert_close(found, ref, torch.float32)


def test_compiled_network_follows_the_tf32_setting(monkeypatch):
    """The setting at run time decides, in the forward and in the backward pass."""
    seen = []

    def choosing(name, problem):
        seen.append(problem.tf32)
        return choose(name, problem)

    monkeypatch.setattr(dispatch, "choose", choosing)
    monkeypatch.setattr(dispatch, "tf32_allowed", tf32_on_the_processor)
    torch.compiler.reset()
    model = Network("lstm")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    for setting in (nullcontext, allowing_tf32, nullcontext):
        with setting():
            outputs_and_gradients(compiled, model, x, None)
    forward_and_backward = len(seen) // 3
    assert seen == [tf32 for tf32 in (False, True, False) for _ in range(forward_and_backward)]
    assert forward_and_backward == 2


def test_compiled_operator_with_cu_seqlens_autocast_and_no_grad():
    torch.compiler.reset()
    Wx, R, b, _ = random_inputs(LSTM, 1, 6, 2, 3, torch.float32)
    cu_seqlens = torch.tensor([0, 2, 2, 6])

    @torch.no_grad()
    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flashrnn(Wx, R, b, cu_seqlens=cu_seqlens)

    for out, ref in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(), run(), strict=True):
        assert torch.equal(out, ref)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_autocast_equals_the_dtype_argument(cell):
    inputs = random_inputs(cell, 2, 20, 2, 8, torch.float32)
    named = results(flashrnn, inputs, function=cell, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(flashrnn, inputs, function=cell)
    assert cast["h"].dtype == torch.bfloat16
    assert cast["last states"].dtype == cast["gradient of R"].dtype == torch.float32
    for name, ref in named.items():
        assert torch.equal(cast[name], ref), name


def test_autocast_does_not_apply_to_float64():
    inputs = random_inputs(LSTM, 2, 4, 1, 3)
    ref = results(flashrnn, inputs, function=LSTM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = results(flashrnn, inputs, function=LSTM)
    for name in ref:
        assert torch.equal(out[name], ref[name]), name


def test_dtype_argument_sets_computation_and_output():
    inputs = random_inputs(LSTM, 2, 4, 1, 3, torch.float32)
    h, last = flashrnn(*inputs, dtype=torch.float64)
    assert h.dtype == last.dtype == torch.float64
    assert relative_error(flashrnn(*inputs)[0], h) < 1e-6


def test_double_backward_is_an_error():
    inputs = random_inputs(LSTM, 1, 2, 1, 2)
    (gradient,) = torch.autograd.grad(flashrnn(*inputs)[0].sum(), inputs.Wx, create_graph=True)
    with pytest.raises(RuntimeError, match=r"'cpu_fused' .*second"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", ["lstm", "gru"])
def test_per_sample_gradients_by_torch_func(function):
    model = Network(function, backend="vanilla")
    x, parameters = torch.randn(3, 4, 5), {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None], None))[0].square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for b in range(3):
        expected = torch.autograd.grad(model(x[b : b + 1], None)[0].square().sum(), model.parameters())
        for name, ref in zip(parameters, expected, strict=True):
            torch.testing.assert_close(gradients[name][b], ref)


@pytest.mark.parametrize("backend", ["vanilla", "cpu_fused"])
@pytest.mark.parametrize("no_grad", [False, True], ids=["", "no_grad"])
def test_vmap_over_an_ensemble(no_grad, backend):
    models = [FlashRNN(5, 6, num_heads=2, backend=backend) for _ in range(3)]
    x, (parameters, _) = torch.randn(4, 2, 5), torch.func.stack_module_state(models)
    with torch.set_grad_enabled(not no_grad):
        run = torch.func.vmap(lambda parameters: torch.func.functional_call(models[0], parameters, (x,))[0])
        together = run(parameters)
        torch.testing.assert_close(together, torch.stack([model(x)[0] for model in models]))
    if not no_grad:
        together.sum().backward()
        models[1](x)[0].sum().backward()
        torch.testing.assert_close(parameters["recurrent_l0.R"].grad[1], models[1].recurrent_l0.R.grad)


def test_vmap_over_an_ensemble_is_one_call(monkeypatch):
    models, calls, run = [FlashRNN(5, 6, backend="cpu_fused") for _ in range(3)], [], dispatch.run_forward
    monkeypatch.setattr("flashrnn.op.run_forward", lambda *arguments: calls.append(arguments) or run(*arguments))
    x, (parameters, _) = torch.randn(4, 2, 5), torch.func.stack_module_state(models)
    torch.func.vmap(lambda parameters: torch.func.functional_call(models[0], parameters, (x,))[0])(parameters)
    (call,) = calls
    assert call[2].R.shape == (4, 3, 6, 6)


@pytest.mark.parametrize("mapped", [("Wx",), ("Wx", "reset"), ("R", "reset"), ("R", "states"), ("b",)], ids="+".join)
def test_vmap_over_any_inputs(mapped):
    Wx, R, b, states, reset = operator_arguments(LSTM, with_reset=True)
    inputs = {"Wx": Wx, "R": R, "b": b, "states": states, "reset": reset}
    several = {name: torch.stack([inputs[name], inputs[name].flip(-1)]) for name in mapped}
    dims = [1 if name == "Wx" and name in several else 0 if name in several else None for name in inputs]
    given = [several.get(name, x).movedim(0, dim or 0) for (name, x), dim in zip(inputs.items(), dims, strict=True)]

    def run(Wx, R, b, states, reset):
        return flashrnn(Wx, R, b, states, reset=reset, backend="vanilla")

    h, last = torch.func.vmap(run, in_dims=tuple(dims))(*given)
    for k in range(2):
        alone = run(*(several[name][k] if name in several else x for name, x in inputs.items()))
        torch.testing.assert_close((h[k], last[k]), alone)


@pytest.mark.parametrize("backend", ["vanilla", "cpu_fused"])
def test_saved_tensors_hooks_may_change_layouts(backend):
    """Hooks for activation offloading, for example, may return dense copies."""
    Wx, R, b, states = random_inputs(LSTM, 3, 4, 2, 5)
    inputs = (Wx.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), R, b, states)

    def gradients(pack):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            h, last, states = flashrnn(*inputs, backend=backend, return_states=True)
        return torch.autograd.grad(h.square().sum() + last.sum() + states[1].sin().sum(), inputs)

    expected = gradients(lambda x: x)
    found = gradients(lambda x: x if x.shape == Wx.shape else x.contiguous())
    for out, ref in zip(found, expected, strict=True):
        torch.testing.assert_close(out, ref)


def test_forward_mode_derivatives_are_an_error():
    Wx, R, b, _ = (x.detach() for x in random_inputs(LSTM, 1, 2, 1, 2))
    message = "'auto' .*forward-mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda R: flashrnn(Wx, R, b)[0], (R,), (R,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        flashrnn(torch.autograd.forward_ad.make_dual(Wx, Wx), R, b)


def test_compiled_torch_func_gives_equal_results():
    torch.compiler.reset()
    Wx, R, b, _ = (x.detach() for x in random_inputs(LSTM, 2, 3, 1, 2))
    gradient = torch.func.grad(lambda R: flashrnn(Wx, R, b, backend="vanilla")[0].square().sum())
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(R), gradient(R))


def test_backends_are_not_compiled():
    """After a graph break in the calling function, the compiler would compile the functions of backends."""
    torch.compiler.reset()
    model, x = FlashRNN(3, 4), torch.randn(5, 2, 3)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,))[0].square().sum()

    torch._dynamo.utils.clear_compilation_metrics()
    torch.compile(torch.func.grad(loss), backend="aot_eager")(parameters)
    files = {Path(str(metrics.co_filename)).name for metrics in torch._dynamo.utils.get_compilation_metrics()}
    assert files & {"layer.py", "op.py"}
    assert not files & {"backend.py", "reference.py", "dispatch.py"}


def test_second_derivatives_by_torch_func_are_an_error():
    Wx, R, b, _ = (x.detach() for x in random_inputs(LSTM, 1, 2, 1, 2))
    gradient = torch.func.grad(lambda R: flashrnn(Wx, R, b, backend="cpu_fused")[0].sum())
    with pytest.raises(RuntimeError, match=r"'cpu_fused' .*second"):
        torch.func.grad(lambda R: gradient(R).sum())(R)


def test_works_in_inference_mode():
    inputs = random_inputs(LSTM, 1, 2, 1, 2)
    with torch.inference_mode():
        out = flashrnn(*inputs)[0]
    assert torch.equal(out, flashrnn(*inputs)[0])


def test_meta_tensors_have_shapes_and_dtypes():
    inputs = [x.to("meta") for x in random_inputs(get_cell("slstm"), 2, 5, 3, 4, torch.bfloat16)]
    h, last = flashrnn(*inputs, function="slstm")
    assert (h.shape, h.dtype, h.device.type) == ((2, 5, 3, 4), torch.bfloat16, "meta")
    assert (last.shape, last.dtype) == ((4, 2, 3, 4), torch.float32)


def bad(**changes):
    """Return wrong arguments for an LSTM with B=2, T=3, N=2, D=4."""
    Wx, R, b, states = random_inputs(LSTM, 2, 3, 2, 4, torch.float32)
    return {"Wx": Wx, "R": R, "b": b, "states": states, "function": LSTM} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"Wx": [[[[[0.0]]]]]}, TypeError, "Wx .*list"),
        ({"states": (torch.zeros(2, 1, 2, 4),) * 2}, TypeError, "states .*tuple"),
        ({"reset": [True, False]}, TypeError, "reset .*list"),
        ({"cu_seqlens": [0, 3]}, TypeError, "cu_seqlens .*list"),
        ({"Wx": torch.zeros(2, 3, 32)}, ValueError, r"Wx .*\[B, T, gates.*\[2, 3, 32\]"),
        ({"Wx": torch.zeros(2, 3, 3, 2, 4)}, ValueError, r"Wx .*3 .*'lstm' .*4: \('i', "),
        ({"Wx": torch.zeros(2, 0, 4, 2, 4)}, ValueError, r"at least one step.*\[2, 0, 4, 2, 4\]"),
        ({"Wx": torch.zeros(2, 3, 4, 2, 4).long()}, TypeError, r"Wx .*floating-point.*torch\.int64"),
        ({"dtype": torch.complex64}, TypeError, r"dtype .*float64.*torch\.complex64"),
        ({"R": torch.zeros(4, 2, 4, 3)}, ValueError, r"R .*\[4, 2, 4, 4\].*\[4, 2, 4, 3\]"),
        ({"R": torch.zeros(4, 2, 4, 4).long()}, TypeError, r"R .*floating-point.*torch\.int64"),
        ({"b": torch.zeros(8, 4)}, ValueError, r"b .*\[4, 2, 4\] .*\[8, 4\]"),
        ({"b": torch.zeros(4, 2, 4).to("meta")}, ValueError, "b .*meta.* cpu"),
        ({"Wx": None}, TypeError, "Wx .*NoneType"),
        ({"R": None}, TypeError, "R .*NoneType"),
        ({"b": 0.0}, TypeError, "b .*float"),
        ({"states": torch.zeros(2, 3, 2, 4)}, ValueError, r"states .*\[2, 2, 2, 4\].*\[2, 3, 2, 4\]"),
        ({"states": torch.zeros(2, 2, 2, 4).to("meta")}, ValueError, "states .*meta.* cpu"),
        ({"reset": torch.zeros(2, 4).bool()}, ValueError, r"reset .*\[2, 3\].*\[2, 4\]"),
        ({"reset": torch.zeros(2, 3)}, TypeError, r"reset .*bool.*torch\.float32"),
        ({"reset": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 3])}, ValueError, "reset .*cu_seqlens"),
        ({"states": torch.zeros(2, 1, 2, 4), "cu_seqlens": torch.tensor([0, 3])}, ValueError, "states .*cu_seqlens"),
        ({"states": None, "cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens .*batch size .*2"),
        ({"function": "ltsm"}, ValueError, "'ltsm'.* elman, elman_relu, gru"),
        ({"backend": "cudnn"}, ValueError, "'cudnn'.* auto, .*vanilla"),
    ],
)
def test_wrong_arguments_are_an_error(changes, error, message):
    with pytest.raises(error, match=message):
        flashrnn(**bad(**changes))


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([1, 3], ValueError, r"cu_seqlens .* 0 .*3, got \[1, 3\]"),
        ([0, 2], ValueError, r"cu_seqlens .* 0 .*3, got \[0, 2\]"),
        ([0, 2, 1, 3], ValueError, r"cu_seqlens .* 0 .*3, got \[0, 2, 1, 3\]"),
        ([], TypeError, r"cu_seqlens .*integer.*torch\.float32"),
        ([0.0, 3.0], TypeError, r"cu_seqlens .*integer.*torch\.float32"),
        ([[0, 3]], ValueError, r"cu_seqlens .*one-dimensional.*\[1, 2\]"),
    ],
)
def test_wrong_cu_seqlens_are_an_error(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        flashrnn(**bad(Wx=torch.zeros(1, 3, 4, 2, 4), states=None, cu_seqlens=torch.tensor(cu_seqlens)))


def test_gradient_of_a_program_exported_without_gradients_is_an_error():
    rnn, x = (
        FlashRNN(4, 6, num_heads=2, backend="cpu_fused"),
        torch.randn(3, 2, 4),
    )  # "auto" would run the eager LSTM by oneDNN
    with torch.no_grad():
        program = torch.export.export(rnn, (x,)).module()
    out, _ = program(x)
    assert torch.equal(out, rnn(x)[0])
    with pytest.raises(RuntimeError, match="without gradients"):
        out.sum().backward()


@pytest.mark.parametrize("num_heads", [1, 2])
def test_exported_programs_accept_other_batch_sizes_and_lengths(num_heads):
    rnn = FlashRNN(4, 6, num_heads=num_heads, backend="cpu_fused").eval()
    dims = {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}
    program = torch.export.export(rnn, (torch.randn(5, 3, 4),), dynamic_shapes=(dims,), strict=False).module()
    rounding = {} if num_heads == 1 else {"rtol": 0, "atol": 0}  # with one head, the kernel also computes W x
    for T, B in ((9, 7), (4, 7), (5, 1), (1, 3)):
        x = torch.randn(T, B, 4)
        torch.testing.assert_close(program(x)[0], rnn(x)[0], **rounding)


def test_missing_biases_are_zeros():
    Wx, R, b, states = random_inputs(LSTM, 2, 3, 2, 4)
    for none, zeros in zip(flashrnn(Wx, R, None, states), flashrnn(Wx, R, 0 * b, states), strict=True):
        assert torch.equal(none, zeros)


@pytest.mark.parametrize("function", ["gru", "slstm"])
def test_returned_states_do_not_share_memory(function):
    inputs = random_inputs(get_cell(function), 2, 3, 2, 4)
    h, last, states = flashrnn(*inputs, function, return_states=True)
    assert states[0] is h
    assert torch.equal(torch.stack(states)[:, :, -1], last)
    for state in states:
        state.mul_(2)
    alone, end = flashrnn(*inputs, function)
    assert torch.equal(h, 2 * alone)
    assert torch.equal(last, end)


@pytest.mark.parametrize("backend", ["vanilla", "cpu_fused"])
def test_step_may_choose_constants_by_dtype(backend):
    """With the epsilon of float32, gradcheck in float64 would fail."""

    def step(g, n, h):
        n = torch.exp(n)
        return torch.tanh(g + h) * n / (n + torch.finfo(n.dtype).eps ** 0.25)

    cell = Cell("with_epsilon", step, states=("h",))
    inputs = [value.requires_grad_() for value in random_inputs(cell, 2, 3, 1, 4)]

    def states(Wx, R, b, initial):
        return flashrnn(Wx, R, b, initial, function=cell, backend=backend)[0]

    assert torch.autograd.gradcheck(states, inputs)
