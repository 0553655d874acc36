import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flashrnn import flashrnn, get_cell
from flashrnn.cpu import threads
from tests.problems import random_inputs


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def output() -> torch.Tensor:
    inputs = random_inputs(get_cell("lstm"), 4, 6, 2, 8, torch.float32)
    with torch.no_grad():
        return flashrnn(*inputs, function="lstm", backend="cpu_fused")[0]


@pytest.mark.usefixtures("_two_threads")
def test_every_task_runs_once():
    done = []
    threads.run([lambda k=k: done.append(k) for k in range(100)])
    assert sorted(done) == list(range(100))


@pytest.mark.usefixtures("_two_threads")
def test_an_error_in_any_task_reaches_the_caller():
    def fail():
        raise ValueError("task failed")

    for place in range(4):
        with pytest.raises(ValueError, match="task failed"):
            threads.run([fail if k == place else int for k in range(4)])


@pytest.mark.usefixtures("_two_threads")
def test_callers_in_several_threads_get_the_same():
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
def test_workers_forked_after_use_get_the_same():
    expected = output()
    for found in DataLoader(Outputs(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
        assert torch.equal(found, expected)


def _child(queue):
    threads.run([lambda k=k: queue.put(k) for k in range(4)])


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_starts_threads_of_its_own():
    threads.run([int] * 4)  # the parent's threads, which the child does not have
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert sorted(queue.get() for _ in range(4)) == [0, 1, 2, 3]
