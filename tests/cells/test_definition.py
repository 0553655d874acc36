import copy
import itertools
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from flashrnn import Cell, FlashRNN, flashrnn, get_cell, register, registered_cells
from flashrnn.cells import cell_of_key
from flashrnn.cells.registry import _REGISTRY
from flashrnn.cells.trace import trace
from tests import fresh
from tests.problems import BUILT_IN, MINIMAL_GATED, PEEPHOLE_LSTM, cell_name


def step(g, h):
    return torch.tanh(g)


@pytest.fixture
def _registry():
    """Remove the cells that a test registers."""
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


@pytest.mark.parametrize(
    ("name", "gates", "input_gates", "recurrent_gates", "states"),
    [
        ("elman", "g", "g", "g", "h"),
        ("gru", "grzn", "rzn", "grz", "h"),
        ("lstm", "ifzo", "ifzo", "ifzo", "hc"),
        ("slstm", "ifzo", "ifzo", "ifzo", "hcnm"),
    ],
)
def test_gates_and_states_of_the_built_in_cells(name, gates, input_gates, recurrent_gates, states):
    cell = get_cell(name)
    assert (cell.name, *map("".join, (cell.gates, cell.input_gates, cell.recurrent_gates, cell.states))) == (
        name, gates, input_gates, recurrent_gates, states,
    )  # fmt: skip


def test_slstm_equals_its_definition_without_stabiliser():
    """Compares with h = o c / n of xLSTM's equations 8-14, whose exponentials do not overflow for these gates."""
    i, f, z, o = gates = torch.randn(4, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states = [torch.zeros(5, dtype=torch.float64)] * 4
    c = n = torch.zeros(5, dtype=torch.float64)
    for t in range(20):
        states = get_cell("slstm").update(list(gates[:, t]), list(states))
        c = torch.sigmoid(f[t]) * c + torch.exp(i[t]) * torch.tanh(z[t])
        n = torch.sigmoid(f[t]) * n + torch.exp(i[t])
        torch.testing.assert_close(states[0], torch.sigmoid(o[t]) * c / n, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cell", BUILT_IN, ids=cell_name)
def test_large_gates_give_finite_results_and_gradients(cell):
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(cell.input_gates))))
    Wx = (1e3 * signs)[:, None, :, None, None].expand(-1, 3, -1, 1, 1).contiguous().requires_grad_()
    R, b = torch.ones(len(cell.recurrent_gates), 1, 1, 1), torch.zeros(len(cell.gates), 1, 1)
    every, _ = flashrnn(Wx, R, b, function=cell)
    every.sum().backward()
    assert every.isfinite().all()
    assert Wx.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": ("c",)}, r"\('g', 'h'\).*\('c',\)"),
        ({"states": ("g", "h")}, r"\('g', 'h'\).*\('g', 'h'\)"),
        ({"states": ()}, r"\('g', 'h'\).*\(\)"),
        ({"states": "h"}, r"states='h' .*\('h',\)"),
        ({"states": ("h",), "input_gates": ("x",)}, r"input_gates \['x'\] .*\('g',\)"),
        ({"states": ("h",), "recurrent_gates": ("h",)}, r"recurrent_gates \['h'\] .*\('g',\)"),
        ({"states": ("h",), "recurrent_gates": ()}, r"recurrent_gates=\(\) .*\('g',\)"),
        ({"states": ("h",), "input_gates": "g"}, r"input_gates='g' .*\('g',\)"),
        ({"step": lambda d_g, h: d_g, "states": ("h",)}, r"\['d_g'\] .*\('d_', 'new_', 'factor'\)"),
    ],
)
def test_definition_that_does_not_match_the_step_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=f"'mine': .*{message}"):
        Cell(**{"name": "mine", "step": step} | arguments)


@pytest.mark.parametrize("new", [None, 1.0, (torch.zeros(2), torch.zeros(2))])
def test_step_must_return_a_tensor_for_each_state(new):
    with pytest.raises(ValueError, match=r"'mine'.*\('h',\)"):
        Cell("mine", lambda g, h: new, states=("h",))


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (lambda g, h: g - g.mean(), "element-wise"),
        (lambda g, h: torch.softmax(g, -1) + h, "element-wise"),
        (lambda g, h: g.cumsum(-1), "element-wise"),
        (lambda g, h: g + h.flip(-1), "element-wise"),
        (lambda g, h: g + h.sort(-1).values, "element-wise"),
        (lambda g, h: g + h.cummax(0).values, "element-wise"),
        (lambda g, h: g + h.median(), "element-wise"),
        (lambda g, h: g if (h.as_subclass(torch.Tensor) > 0).any() else h, "element-wise"),
        (lambda g, h: g + torch.ones(3) * h, "any shape.*gate of its bias alone"),
        (lambda g, h: g[..., 0] + h, "any shape"),
        (lambda g, h: g if h > 0 else h, r"Python branches.*torch\.where"),
        (lambda g, h: g if h.max() > 3 else h, "Python branches"),
        (lambda g, h: g * float(h.isnan().any()), "Python branches"),
    ],
    ids=[
        "mean",
        "softmax",
        "cumsum",
        "flip",
        "sort",
        "maximum so far",
        "median",
        "hidden branch",
        "captured units",
        "index",
        "branch",
        "branch on large values",
        "values of all units",
    ],
)
def test_step_that_reads_other_units_is_an_error(mixing, message):
    with pytest.raises(ValueError, match=f"'mine': .*{message}"):
        Cell("mine", mixing, states=("h",))


@pytest.mark.parametrize("step", [lambda g, *, h: g + h, lambda *gates_and_h: gates_and_h[0]])
def test_step_must_take_its_arguments_by_position(step):
    with pytest.raises(ValueError, match=r"'mine'.*\['\w+'\]"):
        Cell("mine", step, states=("h",))


@pytest.mark.parametrize("p", [1e-6, 0.5])
def test_step_that_draws_random_numbers_is_an_error(p):
    with pytest.raises(ValueError, match=r"'mine'.*random"):
        Cell("mine", lambda g, h: torch.nn.functional.dropout(torch.tanh(g), p), states=("h",))


def test_unknown_cell_lists_the_registered_ones():
    with pytest.raises(ValueError, match="unknown cell 'lstn'; registered cells: ") as error:
        get_cell("lstn")
    assert all(name in str(error.value) for name in registered_cells())


@pytest.mark.usefixtures("_registry")
def test_registering_a_name_again_replaces_the_cell():
    first = register(Cell("mine", step, states=("h",)))
    assert get_cell("mine") is first
    assert "mine" in registered_cells()
    second = register(Cell("mine", step, states=("h",)))
    assert get_cell("mine") is second


@pytest.mark.usefixtures("_registry")
def test_built_in_cells_cannot_be_replaced():
    with pytest.raises(ValueError, match=r"'lstm' .*built-in"):
        register(Cell("lstm", lambda f, h: f + h, states=("h",)))


def test_name_with_dots_cannot_be_registered():
    with pytest.raises(ValueError, match=r"'my\.cell'"):
        register(Cell("my.cell", step, states=("h",)))


def test_dotted_name_imports_a_cell_from_its_module():
    assert get_cell("flashrnn.cells.GRU") is get_cell("gru")
    with pytest.raises(ValueError, match=r"'flashrnn\.cells\.GURU'"):
        get_cell("flashrnn.cells.GURU")
    with pytest.raises(ValueError, match=r"'no_module\.CELL'.*'no_module'"):
        get_cell("no_module.CELL")
    with pytest.raises(TypeError, match=r"flashrnn\.cells\.get_cell .*function"):
        get_cell("flashrnn.cells.get_cell")


@contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS = [
    pytest.param(lambda: torch.device("meta"), id="device"),
    pytest.param(lambda: _default_device("meta"), id="default_device"),
    pytest.param(torch.inference_mode, id="inference_mode"),
    pytest.param(torch.no_grad, id="no_grad"),
    *(pytest.param(lambda d=d: _default_dtype(d), id=str(d)) for d in (torch.float64, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize("context", CONTEXTS)
def test_cell_does_not_depend_on_modes_and_defaults_of_pytorch(context):
    def step(g, h):
        return torch.where(g > 0, torch.tensor(0.5), torch.ones(())) * h + torch.tanh(g)

    with context():
        inside = Cell("anywhere", step, states=("h",))
        graphs = trace(inside)
    outside = Cell("anywhere", step, states=("h",))
    assert inside.key.partition("#")[0] == outside.key.partition("#")[0]
    assert graphs == trace(outside)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.usefixtures("_registry")
def test_cell_can_be_imported_while_a_model_is_built_on_meta(context, tmp_path, monkeypatch, request):
    """Tensors of the cell's module have values even if the model is created on the meta device."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"cells_{request.node.callspec.id}".replace(".", "_")
    tmp_path.joinpath(f"{module}.py").write_text(
        "import torch\nimport flashrnn\n"
        "SHIFT = torch.tensor(0.5)\n"
        "SHIFTED = flashrnn.Cell('shifted', lambda g, h: torch.tanh(g + SHIFT) * h + g, states=('h',))\n"
    )
    with context():
        layer = FlashRNN(4, 4, function=f"{module}.SHIFTED", backend="vanilla", device="meta")
    shift = sys.modules.pop(module).SHIFT
    assert shift == 0.5
    assert not shift.is_inference()
    layer = layer.to_empty(device="cpu").float()
    layer.reset_parameters()
    out, _ = layer(torch.ones(5, 2, 4))
    out.sum().backward()


def test_captured_tensor_on_another_device_is_an_error():
    shift = torch.tensor(0.5, device="meta")
    with pytest.raises(ValueError, match=r"meta.*device='cpu'"):
        Cell("captures", lambda g, h: torch.tanh(g + shift) + h, states=("h",))


def test_register_rejects_a_step():
    with pytest.raises(TypeError, match=r"flashrnn\.Cell, not function"):
        register(step)


def test_cells_of_the_same_name_have_different_keys():
    first, second = (Cell("twin", step, states=("h",)) for _ in range(2))
    assert first.key != second.key


@pytest.fixture(scope="module")
def another_process(tmp_path_factory) -> list[str]:
    """Return the output of a process that unpickles two cells twice and then defines two cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashrnn.cells.registry._REGISTRY", dict(_REGISTRY))
        registered = register(Cell("registered_here", step, states=("h",)))
        pickled = pickle.dumps([Cell("pickled", step, states=("h",), float16_states=True), registered])
    code = (
        "import pickle, sys; (a, c), (b, _) = (pickle.loads(bytes.fromhex(sys.argv[1])) for _ in 'ab'); "
        "print(a.name, a.float16_states, c.name, a is b); "
        "from tests.cells.test_definition import Cell, step; print(*(Cell(n, step, states=('h',)).key for n in 'ab'))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return fresh.program(
        code, pickled.hex(), folder=tmp_path_factory.mktemp("other"), environment=environment
    ).stdout.splitlines()


def test_key_finds_the_same_definition_in_another_process(another_process):
    keys = another_process[1].split()
    here = Cell("a", step, states=("h",))
    assert cell_of_key(keys[0]).name == "a"
    assert here.key.partition("#")[0] == keys[0]
    assert Cell("a", lambda g, h: torch.tanh(g) / 2, states=("h",)).key.partition("#")[0] != keys[0]
    with pytest.warns(UserWarning, match="second .*'a@"):
        assert cell_of_key(f"{keys[0]}#99").name == "a"
    with pytest.raises(ValueError, match="cell 'b'"):
        cell_of_key(keys[1])


def test_copies_share_the_cell():
    assert copy.deepcopy(MINIMAL_GATED) is MINIMAL_GATED
    assert copy.copy(get_cell("gru")) is get_cell("gru")


def test_unpickling_returns_the_registered_cell():
    assert pickle.loads(pickle.dumps(get_cell("lstm"))) is get_cell("lstm")


def test_unpickling_returns_the_same_unregistered_cell():
    assert pickle.loads(pickle.dumps(PEEPHOLE_LSTM)) is PEEPHOLE_LSTM


def weighted(g, h, weight):
    return torch.tanh(weight * g)


@pytest.mark.parametrize("weight", [0.5, torch.tensor(0.75)])
def test_unpickling_returns_the_same_cell_of_a_partial_step(weight):
    name = f"weighted_by_{type(weight).__name__}"
    cell, other = (Cell(name, partial(weighted, weight=w), states=("h",)) for w in (weight, weight / 2))
    assert [pickle.loads(pickle.dumps(one)) for one in (cell, other)] == [cell, other]


def test_pickles_of_user_cells_contain_their_definition(monkeypatch, another_process):
    """In another process, the name may be unknown or belong to another cell."""
    monkeypatch.setattr("flashrnn.cells.registry._REGISTRY", dict(_REGISTRY))
    cell = register(Cell("registered", step, states=("h",)))
    assert pickle.loads(pickle.dumps(cell)) is cell
    found = "pickled True registered_here True"  # a is b: copies with different keys would be compiled again
    assert another_process[0] == found
    unnamed = register(Cell("of_a_lambda", lambda g, h: torch.tanh(g), states=("h",)))
    assert pickle.loads(pickle.dumps(unnamed)) is unnamed


def test_random_numbers_drawn_by_other_threads_are_ignored():
    calls = itertools.count(1)

    def step(g, h):
        if next(calls) == 4:  # as if another thread did so at this moment
            torch.rand(1)
        return torch.tanh(g)

    Cell("beside", step, states=("h",))
    assert next(calls) > 5


def test_parameters_with_defaults_are_constants():
    def leaky(g, h, rate=0.25):
        return (1 - rate) * h + rate * torch.tanh(g)

    for step, rate in ((leaky, 0.25), (partial(leaky, rate=0.5), 0.5)):
        cell = Cell("leaky_with_a_rate", step, states=("h",))
        (new,) = cell.update([torch.tensor(0.5)], [torch.tensor(2.0)])
        assert cell.gates == ("g",)
        assert new == (1 - rate) * 2 + rate * torch.tanh(torch.tensor(0.5))


def test_captured_parameter_is_an_error():
    rate = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ValueError, match="gradients"):
        Cell("captures", lambda g, h: rate * h + torch.tanh(g), states=("h",))
    with torch.no_grad(), pytest.raises(ValueError, match="gradients"):
        Cell("captures", lambda g, h: rate * h + torch.tanh(g), states=("h",))


def test_import_and_trace_load_no_compiler_and_start_no_threads():
    """Importing TorchDynamo takes longer than importing PyTorch; operators on meta tensors would import it and SymPy.

    A process that is forked after OpenMP has started its threads hangs in its first parallel loop.
    """
    program = """if True:
        import os, sys, torch
        threads = len(os.listdir("/proc/self/task"))
        import flashrnn
        assert len(os.listdir("/proc/self/task")) == threads
        assert torch.get_num_threads() == 2
        assert not {"torch._dynamo", "sympy", "numba"} & set(sys.modules), "imported by flashrnn"
        from flashrnn.cells.trace import trace
        for name in ("elman", "gru", "lstm", "slstm"):
            trace(flashrnn.get_cell(name))
        assert not {"torch._dynamo", "sympy"} & set(sys.modules), "imported by a trace, for which a first call waits"
    """
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})


def test_defining_a_cell_does_not_change_the_threads_of_others():
    seen = []

    def step(g, h):
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(torch.get_num_threads).result())  # in a new thread
        return torch.tanh(g)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Cell("beside", step, states=("h",))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {2}


def test_function_cannot_be_used_as_a_cell():
    with pytest.raises(TypeError, match=r"flashrnn\.Cell"):
        get_cell(lambda g, h: torch.tanh(g))
