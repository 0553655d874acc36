"""Training of many small models at once on one GPU, as ensembles whose step is a CUDA graph on a stream of its own.

A step of a small model takes milliseconds of host time, but only a hundred kernels of a few microseconds. A graph needs
almost no host time, models of one shape share the kernels (torch.func.vmap), and ensembles of different shapes run
concurrently. Data, models, optimizers, schedules and evaluation are those of `scripts.train` for the same configs, but
there are no validations, checkpoints or logs.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from data.state_tracking import StateTracking
from data.task import IGNORE
from training.build import fit_model_to_data
from training.config_checks import check
from training.ensemble_linear import InParts
from training.evaluation_metrics import last_answers
from training.results import write
from training.schedules import schedule_of

WARM_UP = 3  # steps before the capture, in which kernels are compiled and optimizers allocate their state


class Batches:
    """The data of a config on a device: all training batches and all test batches."""

    def __init__(self, config: DictConfig, device: torch.device) -> None:
        self.data: StateTracking = instantiate(config.data)
        self.data.prepare_data()
        self.data.setup("fit")
        training = self.data.training_batches(config.trainer.max_steps)
        self.ids, self.labels = (training[name].to(device) for name in ("input_ids", "labels"))  # [steps, B, T]
        self.test = [
            (index, batch["input_ids"].to(device), batch["labels"].to(device))
            for index, loader in enumerate(self.data.test_dataloader())
            for batch in loader
        ]


class Learner:
    """One model of an ensemble, with its optimizer."""

    def __init__(self, config: DictConfig, batches: Batches, device: torch.device) -> None:
        check(config)
        fit_model_to_data(config.model, batches.data)
        seed_everything(config.seed, verbose=False)
        self.config, self.batches, self.device = config, batches, device
        self.steps: int = config.trainer.max_steps
        self.model: nn.Module = instantiate(config.model).to(device)

    def share(self, weights: dict[str, Tensor], rate: Tensor) -> None:
        """Make the parameters views of the ensemble's weights, and build the optimizer, whose rate is a tensor."""
        for name, parameter in self.model.named_parameters():
            parameter.data = weights[name]
        self.optimizer: Optimizer = instantiate(self.config.optim)(self.model, fused=True)
        for group in self.optimizer.param_groups:
            group |= {"lr": rate, "capturable": self.device.type == "cuda"}

    def rates(self) -> list[float]:
        """Return the learning rate of every step."""
        factor = schedule_of(self.config.schedule) or (lambda step: 1.0)
        return [self.config.optim.lr * factor(step) for step in range(self.steps)]


class Ensemble:
    """Models of one shape that are trained in common steps.

    Each has its own weights and learning rate; all have the same data, or each its own.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.left = learners[0].steps
        device = learners[0].device
        self._weights, self._buffers = stack_module_state([learner.model for learner in learners])
        self._rates = torch.tensor([learner.rates() for learner in learners], device=device).T.contiguous()
        self._rate = self._rates[0].clone()
        for k, learner in enumerate(learners):
            learner.share({name: x.data[k] for name, x in self._weights.items()}, self._rate[k])
        self._same_data = all(learner.batches is learners[0].batches for learner in learners)
        self._ids = self._of_all([learner.batches.ids for learner in learners], axis=1)  # [steps, (models,) B, T]
        self._labels = self._of_all([learner.batches.labels for learner in learners], axis=1)
        self._maps = True  # whether vmap can map the model
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # number of the next step
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def _of_all(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Return the data of all learners, stacked along `axis`, or once if all learners share it."""
        return tensors[0] if self._same_data else torch.stack(list(tensors), dim=axis)

    def _step(self) -> None:
        ids, labels = (x.index_select(0, self._number)[0].long() for x in (self._ids, self._labels))
        self._rate.copy_(self._rates.index_select(0, self._number)[0])
        self._take_gradients(self._losses(ids, labels).sum())
        for learner in self.learners:
            learner.optimizer.step()
        self._number += 1

    def _losses(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the scored labels for each model [models]."""
        found = self._logits(ids)
        labels = labels.expand(found.shape[:-1])
        each = F.cross_entropy(found.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none")
        number = (labels != IGNORE).flatten(1).sum(1)
        return each.view(len(self.learners), -1).sum(1) / number

    def _logits(self, ids: Tensor) -> Tensor:
        """Return the logits [models, B, T, classes] for ids [models, B, T], or [B, T] if the models share them."""
        base, own = self.learners[0].model, None if self._same_data else 0

        def logits(weights: dict[str, Tensor], buffers: dict[str, Tensor], ids: Tensor) -> Tensor:
            return functional_call(base, (weights, buffers), (ids,))

        if self._maps:
            try:
                with sdpa_kernel(SDPBackend.MATH), InParts():  # other attention kernels have no gradients under vmap
                    return vmap(logits, in_dims=(0, 0, own))(self._weights, self._buffers, ids)
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                self._maps = False  # the model writes in place, for example: run the models one by one
        models = range(len(self.learners))
        each = [{name: x[k] for name, x in self._weights.items()} for k in models]
        buffers = [{name: x[k] for name, x in self._buffers.items()} for k in models]
        return torch.stack([logits(each[k], buffers[k], ids if own is None else ids[k]) for k in models])

    def _take_gradients(self, loss: Tensor) -> None:
        """Set the gradients of all parameters, clipped by the norm of each model."""
        gradients = torch.autograd.grad(loss, list(self._weights.values()))
        together = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)  # [models, parameters]
        if (most := self.learners[0].config.trainer.gradient_clip_val) is not None:
            together *= (most / (torch.linalg.vector_norm(together, dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        for learner, own in zip(self.learners, together, strict=True):
            parameters = list(learner.model.parameters())
            for parameter, gradient in zip(parameters, own.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = gradient.view_as(parameter)

    @torch.no_grad()
    def evaluate(self, beyond: bool = True) -> list[dict | None]:
        """Return the result of `StateTracking.evaluate` for each model, or None if its weights are not finite.

        Without `beyond`, only sequences of training lengths are tested.
        """
        rows: list[list[Tensor]] = [[] for _ in self.learners]
        for tests in zip(*(learner.batches.test for learner in self.learners), strict=True):
            if tests[0][0] > 0 and not beyond:
                continue
            ids, labels = (self._of_all([test[k] for test in tests]) for k in (1, 2))
            right = self._logits(ids).argmax(-1) == labels
            for of_model, of_learner, (loader, _, own) in zip(rows, right, tests, strict=True):
                of_model.append(last_answers(of_learner, own, loader))
        finite = torch.stack([x.flatten(1).isfinite().all(1) for x in self._weights.values()]).all(0).tolist()
        return [
            learner.batches.data.report(torch.cat(of_model).float().cpu()) if ended_well else None
            for learner, of_model, ended_well in zip(self.learners, rows, finite, strict=True)
        ]

    def capture(self) -> None:
        """On a GPU, take the first steps and capture a graph for the others."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                self.step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._step()
        self._graph = graph

    def step(self) -> None:
        """Take one step, or launch its graph if there is one."""
        if self._graph is None:
            self._step()
        else:
            with torch.cuda.stream(self._stream):
                self._graph.replay()
        self.left -= 1


def train_together(
    runs: Mapping[Path, DictConfig], device: torch.device, drawn: dict[str, Batches] | None = None, beyond: bool = True
) -> dict[Path, str]:
    """Train the models of several configs, and write eval.json to the folder of each.

    Args:
        runs: the configs by the folders of their results.
        device: a GPU; a CPU works too, but is no faster than one run after the other.
        drawn: a cache of data between calls; data of this call are added to it.
        beyond: also test lengths beyond those of training.

    Returns:
        For each run without a result, the reason.
    """
    start = time.perf_counter()
    drawn = {} if drawn is None else drawn
    shapes: dict[str, dict[Path, Learner]] = {}
    for folder, config in runs.items():
        described = f"{OmegaConf.to_container(config.data, resolve=True)}, {config.trainer.max_steps} steps"
        if described not in drawn:
            drawn[described] = Batches(config, device)
        learner = Learner(config, drawn[described], device)
        shape = f"{OmegaConf.to_container(config.model)}, {config.trainer.max_steps} steps"
        shapes.setdefault(shape, {})[folder] = learner
    ensembles = [Ensemble(list(learners.values())) for learners in shapes.values()]
    _train(ensembles)
    failed = {}
    for learners, ensemble in zip(shapes.values(), ensembles, strict=True):
        for (folder, learner), result in zip(learners.items(), ensemble.evaluate(beyond), strict=True):
            if result is None:
                failed[folder] = "FloatingPointError: weights are not finite at the end: lower optim.lr"
                continue
            parameters = sum(parameter.numel() for parameter in learner.model.parameters())
            facts = {"parameters": parameters, "step": learner.steps, "devices": 1}
            write(folder, result, learner.config, device, **facts, seconds=time.perf_counter() - start)
    return failed


def _train(ensembles: Sequence[Ensemble]) -> None:
    for ensemble in ensembles:
        ensemble.capture()
    while left := [ensemble for ensemble in ensembles if ensemble.left]:
        for ensemble in left:
            ensemble.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
