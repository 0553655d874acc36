"""The settings of a command's process: threads and precision of PyTorch, and messages of Lightning."""

import logging
import warnings

import torch

MATMUL_PRECISIONS = ("highest", "high", "medium")  # those of torch.set_float32_matmul_precision


def prepare_process(threads: int | None, matmul_precision: str | None = None) -> None:
    """Configure PyTorch and logging for a command.

    Set the number of PyTorch's threads and the precision of its float32 products, unless they are None, and suppress
    messages of Lightning that users cannot act on.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: expected at least 1, or null for one per core")
        torch.set_num_threads(threads)
    if matmul_precision is not None:
        if matmul_precision not in MATMUL_PRECISIONS:
            allowed = ", ".join(MATMUL_PRECISIONS)
            raise ValueError(f"matmul_precision={matmul_precision}: expected one of {allowed}, or null for PyTorch's")
        torch.set_float32_matmul_precision(matmul_precision)
    messages = logging.getLogger("lightning.pytorch")
    messages.setLevel(logging.WARNING)
    logging.getLogger("lightning").propagate = False  # it has its own handler; do not print messages twice
    messages.getChild("profilers").setLevel(logging.INFO)  # profilers log their tables
    warnings.filterwarnings("ignore", message=".*dirpath has changed")  # a resumed run may have a new folder
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning uses an old interface of PyTorch
