"""The results of the paper that `python -m scripts.reproduce` regenerates, one file each, and code that they share.

Names and titles are listed here, so that listing them imports nothing else. The module of the same name defines the
Reproduction, whose name is in capitals.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    title: str
    trains: bool = False  # whether it trains models with scripts.train


ENTRIES = {
    "kernel_speed": Entry("Speed of the kernels"),
    "language_model": Entry("Language models on SlimPajama", trains=True),
    "loss_curves": Entry("Language models trained on the same text", trains=True),
    "context": Entry("Perplexity over the position in documents, with carried states", trains=True),
    "over_length": Entry("Long documents and long prompts"),
    "parity": Entry("Parity: trained on short sequences, evaluated on longer ones", trains=True),
    "head_size_limits": Entry("Largest heads"),
    "numerical_error": Entry("Numerical error over long sequences"),
    "roofline": Entry("Roofline"),
    "complexity": Entry("Growth with length, batch and head size"),
    "state_tracking": Entry("State tracking: every task, every model", trains=True),
    "recall": Entry("Recall and state tracking together: a hybrid and its parts", trains=True),
    "extrapolation_throughput": Entry("Extrapolation and throughput"),
}
