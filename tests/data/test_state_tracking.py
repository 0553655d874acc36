import itertools
import pickle
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data import tasks
from data.state_tracking import StateTracking


def first_batches(loader: DataLoader, count: int) -> list[dict]:
    return list(itertools.islice(loader, count))


def lengths(batch: dict) -> np.ndarray:
    return (batch["labels"] != tasks.IGNORE).sum(1).numpy()


@pytest.fixture
def new_task(monkeypatch):
    """Restore the registry of tasks after a test."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    return tasks.task


def test_parity_labels_are_the_running_xor_and_padding_is_ignored():
    for batch in first_batches(StateTracking(max_length=9).train_dataloader(), 3):
        assert batch["input_ids"].shape == batch["labels"].shape == (128, 9)
        for bits, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            length = 9 - labels.count(-100)
            assert 1 <= length <= 9
            assert labels[:length] == list(itertools.accumulate(bits[:length], lambda a, b: a ^ b))
            assert bits[length:] == [0] * (9 - length)
            assert labels[length:] == [-100] * (9 - length)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [7, 128, 300])
def test_sample_depends_only_on_its_index(batch_size, num_workers):
    def samples(batch_size, num_workers):
        loader = StateTracking(batch_size=batch_size, num_workers=num_workers).train_dataloader()
        batches = first_batches(loader, -(-300 // batch_size))
        return torch.cat([torch.stack([batch["input_ids"], batch["labels"]], 1) for batch in batches])[:300]

    assert samples(batch_size, num_workers).equal(samples(50, 0))


def test_seeds_and_splits_have_different_samples():
    arguments = {"min_length": 40, "max_length": 60, "eval_lengths": [40, 60]}
    module, other_seed = StateTracking(**arguments), StateTracking(**arguments, seed=1)
    loaders = [module.train_dataloader(), module.val_dataloader(), *module.test_dataloader()[1:]]
    batches = [next(iter(loader))["input_ids"] for loader in [*loaders, other_seed.train_dataloader()]]
    for one, other in itertools.combinations(batches, 2):
        assert not one.equal(other)


def test_training_lengths_are_uniform():
    batches = first_batches(StateTracking(max_length=10).train_dataloader(), 100)
    counts = np.bincount(np.concatenate([lengths(batch) for batch in batches]), minlength=11)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:], 1280, atol=4 * 1280**0.5)


def test_curriculum_affects_only_training_lengths():
    module = StateTracking(max_length=40, curriculum=40 * 128)
    found = [lengths(batch) for batch in first_batches(module.train_dataloader(), 80)]
    longest = [max(of_batch) for of_batch in found]
    assert longest[0] == 1
    assert 19 <= longest[20] <= 21
    assert longest[:41] == sorted(longest[:41])
    later = np.concatenate(found[40:])
    assert later.max() == 40
    assert later.mean() == pytest.approx(20.5, abs=1)
    without = StateTracking(max_length=40)
    for ours, theirs in zip(module.test_dataloader(), without.test_dataloader(), strict=True):
        assert next(iter(ours))["input_ids"].equal(next(iter(theirs))["input_ids"])


def test_evaluation_ranges_do_not_overlap():
    module = StateTracking(eval_lengths=[40, 64, 128, 256], eval_batches=3, batch_size=100)
    assert module.eval_ranges == [(40, 63), (64, 127), (128, 256)]
    tested = [(1, 40), *module.eval_ranges]  # training lengths, and longer ones
    for (low, high), loader in zip(tested, module.test_dataloader(), strict=True):
        found = np.concatenate([lengths(batch) for batch in loader])
        assert len(loader) == 3
        assert len(found) == 300
        assert low <= found.min() < low + 8
        assert high - 8 < found.max() <= high
    found = np.concatenate([lengths(batch) for batch in module.val_dataloader()])
    assert found.min() < 48
    assert found.max() > 248


def test_additional_range_does_not_change_other_ranges():
    few, more = StateTracking(eval_lengths=[40, 64, 129]), StateTracking(eval_lengths=[40, 64, 129, 300])
    assert next(iter(few.test_dataloader()[1]))["input_ids"].equal(next(iter(more.test_dataloader()[1]))["input_ids"])


def test_final_supervision_keeps_only_the_last_label():
    every = next(iter(StateTracking().train_dataloader()))
    final = next(iter(StateTracking(supervision="final").train_dataloader()))
    assert final["input_ids"].equal(every["input_ids"])
    last = torch.from_numpy(lengths(every) - 1)[:, None]
    assert (lengths(final) == 1).all()
    assert final["labels"].gather(1, last).equal(every["labels"].gather(1, last))


def test_task_is_defined_by_one_function(new_task):
    @new_task(vocab_size=7, num_classes=5)
    def every_second_sum(rng, shape):
        tokens = rng.integers(0, 7, shape)
        return tokens, np.where(np.arange(shape[1]) % 2, tokens.cumsum(1) % 5, tasks.IGNORE)

    module = StateTracking("every_second_sum", supervision="final", min_length=2)
    assert (module.vocab_size, module.num_classes, module.chance) == (7, 5, 0.2)
    batch = next(iter(module.train_dataloader()))
    assert (lengths(batch) == 1).all()  # even if the last position is not scored
    assert ((batch["labels"] != tasks.IGNORE).nonzero()[:, 1] % 2 == 1).all()


MODULE = """
from data.tasks import task

@task(vocab_size=3, num_classes=3)
def sum_modulo_3(rng, shape):
    digits = rng.integers(0, 3, shape)
    return digits, digits.cumsum(axis=1) % 3
"""


@pytest.fixture
def my_tasks(new_task, tmp_path, monkeypatch):
    """Write a user's module my_tasks with the task sum_modulo_3."""
    tmp_path.joinpath("my_tasks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_tasks", None)


@pytest.mark.usefixtures("my_tasks")
def test_task_in_a_users_module():
    module = StateTracking("my_tasks.sum_modulo_3")
    assert (module.task.name, module.vocab_size, module.num_classes) == ("sum_modulo_3", 3, 3)


@pytest.mark.usefixtures("my_tasks")
def test_tasks_can_be_used_in_spawned_processes():
    for name in ("my_tasks.sum_modulo_3", "s3"):
        task = tasks.get_task(name)
        assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.usefixtures("my_tasks")
def test_unknown_task_is_an_error():
    with pytest.raises(ValueError, match=r"'my_tasks\.sums': .*'my_tasks' .*'sums'"):
        StateTracking("my_tasks.sums")
    with pytest.raises(ValueError, match=r"'my_task\.sums': .*'my_task'"):
        StateTracking("my_task.sums")
    with pytest.raises(TypeError, match=r"my_tasks\.task .*function.*data\.tasks\.Task.*@task"):
        StateTracking("my_tasks.task")


def test_duplicate_task_name_is_an_error(new_task):
    with pytest.raises(ValueError, match=r"'parity' .*data\.tasks"):

        @new_task(vocab_size=2, num_classes=2)
        def parity(rng, shape):
            return np.zeros(shape), np.zeros(shape)


@pytest.mark.parametrize(
    ("token", "label", "message"),
    [
        (2, 0, r"'broken' .*token 2.*0 \.\.\. 1"),
        (0, -1, "'broken' .*label -1"),
        (0, 0.5, "'broken' .*labels of dtype float64: expected integers"),
    ],
)
def test_task_with_invalid_values_is_an_error(new_task, token, label, message):
    @new_task(vocab_size=2, num_classes=2)
    def broken(rng, shape):
        return np.full(shape, token), np.full(shape, label)

    with pytest.raises(ValueError, match=message):
        StateTracking("broken")


def test_task_without_labels_is_an_error(new_task):
    @new_task(vocab_size=2, num_classes=2)
    def broken(rng, shape):
        return rng.integers(0, 2, shape)

    with pytest.raises(ValueError, match=r"'broken' drew ndarray: expected \(tokens, labels\)"):
        StateTracking("broken")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "partiy"}, "'partiy'"),
        ({"min_length": 0}, "min_length=0"),
        ({"min_length": 41}, "min_length=41, max_length=40"),
        ({"eval_lengths": [40]}, r"eval_lengths=\[40\]"),
        ({"eval_lengths": 40}, r"eval_lengths=\[40\]: need two or more"),
        ({"eval_lengths": [64, 40]}, r"eval_lengths=\[64, 40\]"),
        ({"supervision": "last"}, "supervision 'last'"),
        ({"batch_size": 0}, "batch_size=0 .*1"),
        ({"eval_batches": 0}, "eval_batches=0 .*1"),
        ({"curriculum": -1}, "curriculum=-1 .*0"),
        ({"num_workers": -1}, "num_workers=-1 .*0"),
        ({"seed": -1}, "seed=-1 .*0"),
        ({"task": "flip_flop"}, "min_length: .*1 .*flip_flop.* 3 "),
        ({"task": "flip_flop", "min_length": 3, "eval_lengths": [2, 9]}, "eval_lengths: .*2 .*flip_flop"),
    ],
)
def test_wrong_arguments_are_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        StateTracking(**arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_training_sees_the_same_batches(fit, tmp_path, num_workers):
    def module():
        return StateTracking(batch_size=4, max_length=8, num_workers=num_workers)

    uninterrupted = fit(module(), max_steps=5)
    assert fit(module(), max_steps=5, ckpt_path=tmp_path / "step=3.ckpt") == uninterrupted[3:]


def test_interrupted_step_is_repeated(fit, tmp_path):
    uninterrupted = fit(StateTracking(batch_size=4), max_steps=4)
    with pytest.raises(RuntimeError, match="broken off"):
        fit(StateTracking(batch_size=4), max_steps=4, fail_at=2)
    resumed = fit(StateTracking(batch_size=4), max_steps=4, ckpt_path=tmp_path / "on_exception.ckpt")
    assert resumed == uninterrupted[2:]
