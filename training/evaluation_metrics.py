"""The metrics that validation and test accumulate over all batches and devices."""

import torch
from torch import Tensor, nn
from torchmetrics.aggregation import CatMetric, SumMetric

from models.loss import IGNORE


class EvaluationMetrics(nn.Module):
    """Sums over scored labels, and rows with facts about each sequence or each window of documents.

    They stay in float32 when Lightning converts the model to another dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        # nan_strategy="disable", because a check for NaN in every batch would stall the GPU.
        self.loss = SumMetric(nan_strategy="disable")  # sum over the scored labels
        self.labels = SumMetric(nan_strategy="disable")  # number of scored labels
        self.right = SumMetric(nan_strategy="disable")  # number of correct predictions
        self.sequences = CatMetric(nan_strategy="disable")  # rows of `last_answers`
        self.windows = CatMetric(nan_strategy="disable")  # rows of TrainingModule.test_windows

    def begin(self) -> None:
        """Reset all metrics."""
        for metric in self.children():
            metric.set_dtype(torch.float32)
            metric.reset()

    def add(self, loss: Tensor, right: Tensor, labels: Tensor) -> Tensor:
        """Add a batch; return the number of its scored labels and the sum of their losses, [2].

        Args:
            loss: the mean loss over the scored labels, a scalar.
            right: bool [B, T], which predictions are correct.
            labels: int64 [B, T].
        """
        number = (labels != IGNORE).sum()
        total = torch.where(number > 0, loss * number, 0.0)
        self.loss.update(total)
        self.labels.update(number)
        self.right.update(right.sum())
        return torch.stack((number, total))

    def means(self) -> dict[str, Tensor]:
        """Return loss, perplexity and accuracy over all scored labels."""
        labels = self.labels.compute()
        loss = self.loss.compute() / labels
        return {"loss": loss, "perplexity": loss.exp(), "accuracy": self.right.compute() / labels}

    def rows(self, metric: CatMetric) -> Tensor:
        """Return the rows of `sequences` or `windows` [rows, ...] on the CPU."""
        return metric.compute().cpu() if metric.update_called else torch.empty(0, 3)


def last_answers(right: Tensor, labels: Tensor, loader: int) -> Tensor:
    """Return a row for each sequence that has a label, int64 [sequences, 3].

    A row contains the number of the loader, the length of the sequence (the position of its last label, from 1), and
    whether the prediction at that position is correct.

    Args:
        right: bool [B, T], which predictions are correct.
        labels: int64 [B, T].
        loader: the number of the loader.
    """
    position = torch.arange(1, right.shape[1] + 1, device=right.device)
    length = torch.where(labels != IGNORE, position, 0).amax(dim=1)  # [B]
    right, length = right[length > 0], length[length > 0]
    last = right.gather(1, length[:, None] - 1).squeeze(1)
    return torch.stack((torch.full_like(length, loader), length, last), dim=1)
