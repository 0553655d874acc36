"""The training module: losses, logs and errors."""

import csv
import os
from functools import partial
from unittest.mock import patch

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.data import DataLoader

from models.backbone import SequenceModel
from models.mixers import RNNMixer
from training.lightning_module import TrainingModule
from training.optim import adamw
from training.schedules import cosine

SETTINGS = {"optim": partial(adamw, lr=0.01), "schedule": cosine(total_steps=6, warmup_steps=1)}


def tiny_module(**options):
    torch.manual_seed(0)
    model = SequenceModel(5, partial(RNNMixer, function="lstm"), num_classes=3, d_model=8, num_blocks=1)
    return TrainingModule(model, **SETTINGS, **options)


def batch(seed=0, B=4, T=7):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (B, T), generator=generator)
    for row in range(B):
        labels[row, T - row :] = -100
    return {"input_ids": torch.randint(5, (B, T), generator=generator), "labels": labels}


def loader(*batches):
    return DataLoader(batches, batch_size=None)


def tiny_trainer(folder, **options):
    settings = {
        "max_steps": 6,
        "accelerator": "cpu",
        "log_every_n_steps": 2,
        "gradient_clip_val": 1e-3,
        "logger": CSVLogger(folder, name="", version=""),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**settings, **options})


def test_values_are_logged(tmp_path):
    module = tiny_module()
    train = loader(*map(batch, range(12)))
    tiny_trainer(tmp_path, accumulate_grad_batches=2).fit(module, train, loader(batch(99)))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    logged = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in logged] == [1, 3, 5]
    for row in logged:
        assert float(row["train/perplexity"]) == pytest.approx(torch.tensor(float(row["train/loss"])).exp().item())
        assert 0 <= float(row["train/accuracy"]) <= 1
        # the norm before clipping, which exceeds the limit
        assert float(row["train/gradient_norm"]) > 1e-3
    assert [float(row["train/lr"]) for row in logged] == pytest.approx([0.01, 0.00689, 0.00186], rel=1e-2)
    (validated,) = [row for row in rows if row["val/loss"]]
    assert float(validated["val/perplexity"]) == pytest.approx(torch.tensor(float(validated["val/loss"])).exp().item())


def test_an_optimizer_in_place_of_its_function_is_refused(tmp_path):
    module = tiny_module()
    module.optim = torch.optim.SGD(module.parameters())
    with pytest.raises(TypeError, match=r"optim must be a function .*got SGD"):
        tiny_trainer(tmp_path).fit(module, loader(batch(0)))


def test_gradients_are_clipped(tmp_path):
    norms = []

    class Watching(TrainingModule):
        def on_before_zero_grad(self, optimizer):
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    module = tiny_module()
    watching = Watching(module.model, module.optim)
    tiny_trainer(tmp_path, max_steps=2).fit(watching, loader(batch(0), batch(1), batch(2)))
    assert norms
    assert max(norms) <= 1e-3 * (1 + 1e-4)


def test_validation_weighs_all_labels_equally(tmp_path):
    module = tiny_module()
    batches = [batch(0, B=4), batch(1, B=1, T=3), batch(2, B=2, T=20)]
    (metrics,) = tiny_trainer(tmp_path).validate(module, loader(*batches), verbose=False)
    with torch.no_grad():
        logits = torch.cat([module.model(b["input_ids"]).flatten(0, 1) for b in batches])
    labels = torch.cat([b["labels"].flatten() for b in batches])
    scored = labels != -100
    loss = F.cross_entropy(logits[scored].double(), labels[scored]).item()
    accuracy = (logits.argmax(-1) == labels)[scored].double().mean().item()
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["val/accuracy"] == pytest.approx(accuracy)


def test_sums_are_float32_in_half_precision(tmp_path):
    """In bfloat16, adding 1,000 labels would not change a sum of 300,000."""
    module = tiny_module()
    batches = [batch(seed, B=64, T=40) for seed in range(8)]
    (metrics,) = tiny_trainer(tmp_path, precision="bf16-true").validate(module, loader(*batches), verbose=False)
    right, number = 0, 0
    with torch.no_grad():
        for b in batches:
            _, answers = module.bfloat16().model.loss(b["input_ids"], b["labels"])
            right, number = right + answers.sum().item(), number + (b["labels"] != -100).sum().item()
    assert metrics["val/accuracy"] == pytest.approx(right / number, rel=1e-6)


def test_batches_without_labels_have_no_effect(tmp_path):
    """A rank with fewer samples than others receives such batches."""
    module, empty = tiny_module(), batch(1)
    empty["labels"][:] = -100
    for run in (Trainer.validate, Trainer.test):
        alone, more = (
            run(tiny_trainer(tmp_path), module, loader(*b), verbose=False) for b in ((batch(),), (batch(), empty))
        )
        assert alone == more
    assert len(module.test_sequences) == 4


def test_test_accuracy_is_that_of_the_last_position(tmp_path):
    module = tiny_module()
    batches = batch(0), batch(1)
    tiny_trainer(tmp_path).test(module, [loader(b) for b in batches], verbose=False)
    expected = []
    for index, b in enumerate(batches):
        answers = module.model(b["input_ids"]).argmax(-1)
        for row, length in enumerate((7, 6, 5, 4)):
            right = answers[row, length - 1] == b["labels"][row, length - 1]
            expected.append([index, length, float(right)])
    torch.testing.assert_close(module.test_sequences, torch.tensor(expected))


def test_reset_is_passed_to_the_model(tmp_path):
    module = tiny_module()
    plain = batch()
    reset = torch.rand(plain["labels"].shape) < 0.5
    losses = []
    for b in (plain, {**plain, "reset": reset}):
        losses.append(tiny_trainer(tmp_path).validate(module, loader(b), verbose=False)[0]["val/loss"])
    assert losses[0] != losses[1]


def test_compiled_model_has_the_same_state_dict():
    assert tiny_module(compile=True).state_dict().keys() == tiny_module().state_dict().keys()


def test_only_the_shape_of_training_is_compiled(tmp_path, monkeypatch):
    """Compiling another shape can take minutes if a loop over time is unrolled."""
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    train, evaluation = map(batch, range(6)), [batch(6), batch(7, B=3), batch(8, T=9)]
    module, trainer = tiny_module(compile=True), tiny_trainer(tmp_path, inference_mode=False)
    trainer.fit(module, loader(*train), loader(evaluation[0]))
    (metrics,) = trainer.test(module, loader(*evaluation), verbose=False)
    assert compiled.frame_count == 2  # with and without gradients
    uncompiled = tiny_module()
    uncompiled.load_state_dict(module.state_dict())
    assert trainer.test(uncompiled, loader(*evaluation), verbose=False)[0] == pytest.approx(metrics)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_stops_if_the_loss_is_not_finite(tmp_path, value):
    module = tiny_module()
    with torch.no_grad():
        module.model.head.weight[0, 0] = value
    with pytest.raises(FloatingPointError, match=r"nan .*0.*optim\.lr"):
        tiny_trainer(tmp_path).fit(module, loader(batch()))
    with pytest.raises(FloatingPointError, match=r"val loss .*nan"):
        tiny_trainer(tmp_path).validate(module, loader(batch()))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """On a GPU, the loss is not checked in every step, so a checkpoint could be saved before the error."""
    module = tiny_module()
    module.trainer = tiny_trainer(tmp_path)
    module.on_save_checkpoint({"state_dict": module.state_dict()})
    with torch.no_grad():
        module.model.head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"model\.head\.weight .*step 0.*optim\.lr"):
        module.on_save_checkpoint({"state_dict": module.state_dict()})


def test_all_processes_fail_if_weights_are_not_finite(tmp_path, monkeypatch):
    """With FSDP, only one process has the weights of a checkpoint."""
    module = tiny_module()
    module.trainer = tiny_trainer(tmp_path)
    monkeypatch.setattr(module.trainer.strategy, "reduce_boolean_decision", lambda decision, all: True)
    with pytest.raises(FloatingPointError, match=r"weight .*step 0.*optim\.lr"):
        module.on_save_checkpoint({"state_dict": {}})


@pytest.mark.parametrize(("key", "value"), [("input_ids", 5), ("labels", 3)])
def test_batches_must_fit_the_model(tmp_path, key, value):
    wrong = batch()
    wrong[key][0, 0] = value
    with pytest.raises(ValueError, match=f"{key} .*{value}.* 0 to {value - 1}"):
        tiny_trainer(tmp_path).fit(tiny_module(), loader(wrong))


def test_clipping_by_value_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="gradient_clip_algorithm=value"):
        tiny_trainer(tmp_path, gradient_clip_algorithm="value").fit(tiny_module(), loader(batch()))


def test_only_graphs_with_reduced_gradients_are_split(tmp_path, monkeypatch):
    """PyTorch splits graphs at the buckets of DistributedDataParallel, which makes them slower."""
    graphs = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    found, whole = [], 1

    class Count(Callback):
        def on_train_batch_end(self, *_):
            found.append(graphs.frame_count)

    model = SequenceModel(5, partial(RNNMixer, function="lstm"), num_classes=3, d_model=256, num_blocks=2)
    module = TrainingModule(model, **SETTINGS, compile=True)
    strategy = DDPStrategy(bucket_cap_mb=1)
    options = {"strategy": strategy, "devices": 1, "accumulate_grad_batches": 3, "max_steps": 2, "callbacks": [Count()]}
    try:
        with patch.dict(os.environ):  # Lightning sets the ranks there
            trainer = tiny_trainer(tmp_path, **options)
            trainer.fit(module, loader(*map(batch, range(6))))
            trainer.validate(module, loader(batch(6)), verbose=False)
    finally:
        distributed.destroy_process_group()
    cut = found[-1] - whole
    assert cut > 1
    assert found == [whole, whole, *[whole + cut] * 4]
    assert graphs.frame_count == found[-1] + whole  # the graphs of the validation
