"""The results of the paper that `python -m scripts.reproduce` regenerates, one file each, and code that they share.

Names and titles are listed here, so that listing them imports nothing else.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    module: str  # a module of this package, with a Reproduction whose name is that of the entry in capitals
    title: str
    trains: bool = False  # whether it trains models with scripts.train


ENTRIES = {
    "kernel_speed": Entry("kernels", "Speed of the kernels"),
    "language_model": Entry("language_model", "Language models on SlimPajama", trains=True),
    "loss_curves": Entry("loss_curves", "Language models trained on the same text", trains=True),
    "context": Entry("context", "Perplexity over the position in documents, with carried states", trains=True),
    "over_length": Entry("over_length", "Long documents and long prompts"),
    "parity": Entry("parity", "Parity: trained on short sequences, evaluated on longer ones", trains=True),
    "head_size_limits": Entry("limits", "Largest heads"),
    "numerical_error": Entry("kernels", "Numerical error over long sequences"),
    "roofline": Entry("roofline", "Roofline"),
    "complexity": Entry("complexity", "Growth with length, batch and head size"),
    "state_tracking": Entry("state_tracking", "State tracking: every task, every model", trains=True),
    "recall": Entry("recall", "Recall and state tracking together: a hybrid and its parts", trains=True),
    "extrapolation_throughput": Entry("throughput", "Extrapolation and throughput"),
}
