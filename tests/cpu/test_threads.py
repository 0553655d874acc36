import multiprocessing
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flashrnn import flashrnn, get_cell
from flashrnn.cpu import threads
from tests.problems import random_inputs, results

needs_openmp = pytest.mark.skipif(threads._openmp is None, reason="this PyTorch has no OpenMP that could be called")


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _no_openmp(monkeypatch):
    monkeypatch.setattr(threads, "_openmp", None)


def output(B: int = 4, N: int = 2) -> torch.Tensor:
    inputs = random_inputs(get_cell("lstm"), B, 6, N, 8, torch.float32)
    with torch.no_grad():
        return flashrnn(*inputs, function="lstm", backend="cpu_fused")[0]


def call_in_threads(function, tasks: int) -> None:
    c_function = CFUNCTYPE(None, c_void_p)(lambda _: function())
    words = array("q", [0])
    threads.run(cast(c_function, c_void_p).value, threads.Data(words, ()), tasks)


@needs_openmp
@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(("tasks", "expected"), [(1, 1), (2, 2), (5, 2)])
def test_number_of_threads_is_that_of_pytorch(tasks, expected):
    seen = []
    call_in_threads(lambda: seen.append(threading.get_ident()), tasks)
    assert len(seen) == len(set(seen)) == expected
    assert threading.get_ident() in seen


@needs_openmp
@pytest.mark.usefixtures("_two_threads")
def test_results_are_the_same_within_a_parallel_region():
    expected, found = output(), []
    call_in_threads(lambda: found.append(output()), 2)
    assert len(found) == 2
    for result in found:
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("B", "N"), [(1, 1), (1, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_outputs_do_not_depend_on_the_number_of_threads(B, N, count):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = output(B, N)
    torch.set_num_threads(count)
    found = output(B, N)
    torch.set_num_threads(before)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("_two_threads")
def test_gradients_are_reproducible():
    inputs = random_inputs(get_cell("lstm"), 33, 20, 1, 16, torch.float32)
    first, *others = (results(flashrnn, inputs, function="lstm", backend="cpu_fused") for _ in range(5))
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


@pytest.mark.usefixtures("_two_threads", "_no_openmp")
def test_results_are_the_same_without_openmp(monkeypatch):
    found = output()
    monkeypatch.undo()
    assert torch.equal(found, output())


@pytest.mark.usefixtures("_two_threads", "_no_openmp")
def test_errors_of_threads_are_raised_without_openmp():
    def fail(address):
        raise ValueError("thread failed")

    with pytest.raises(ValueError, match="thread failed"):
        threads._run_in_pool(fail, threads.Data(array("q", [0]), ()), 2)


@pytest.mark.usefixtures("_two_threads")
def test_concurrent_calls_give_the_same_results():
    expected = output()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: output(), range(16)):
            assert torch.equal(found, expected)


class Outputs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return output()


@pytest.mark.usefixtures("_two_threads")
def test_forked_data_workers_give_the_same_results():
    expected = output()
    for found in DataLoader(Outputs(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
        assert torch.equal(found, expected)


def _child(queue):
    queue.put((torch.get_num_threads(), output().tolist()))


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("pool", [False, True], ids=["openmp", "pool"])
def test_forked_process_starts_its_own_threads(pool, monkeypatch):
    if pool:
        monkeypatch.setattr(threads, "_openmp", None)
    expected = output()  # starts the parent's threads, which the child does not have
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert queue.get() == (2, expected.tolist())
