"""The networks that `layers` measures, with shapes of programs that use nn.LSTM or nn.GRU today."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

GPU_PRECISIONS = {
    "float16": ("world model", "speech", "language"),
    "tf32": ("ppo", "world model", "time series", "speech"),
    "float32": ("ppo", "time series", "control"),
    "bfloat16": ("world model", "speech", "language"),
}
"""The families that are measured in each precision, because their programs use it; all families would take seven
minutes. The order puts the most informative precisions first, in case a run is interrupted."""
CPU_BFLOAT16 = ((64, 40, 64), (128, 64, 128), (16, 64, 256), (1, 50, 128), (16, 1, 64))
"""The sizes B, T, H that are measured on a CPU in bfloat16: a few, because it is slow on many processors."""


@dataclass(frozen=True)
class LayerCase:
    """A network with one head, with inputs as wide as its outputs, and the sizes of a call."""

    family: str
    cell: str  # lstm or gru
    B: int
    T: int
    H: int
    precision: str = "float32"
    num_layers: int = 1
    bidirectional: bool = False
    reset: bool = False  # states are reset where an episode starts, about once in 32 steps

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of inputs and weights."""
        return torch.float32 if self.precision == "tf32" else getattr(torch, self.precision)

    @property
    def name(self) -> str:
        """Return the name, such as ppo-lstm-B256-T16-H128-float32."""
        kinds = f"-{self.num_layers}layers" * (self.num_layers > 1) + "-bidirectional" * self.bidirectional
        sizes = f"B{self.B}-T{self.T}-H{self.H}"
        return f"{self.family}-{self.cell}-{sizes}{kinds}{'-reset' * self.reset}-{self.precision}"


def _cases(family: str, *sizes: tuple[int, int, int], **options) -> list[LayerCase]:
    return [LayerCase(family, cell, *size, **options) for size in sizes for cell in ("lstm", "gru")]


GPU = [
    *_cases("ppo", (256, 128, 128), (1024, 64, 256), (4096, 16, 128), (4096, 32, 512), (8192, 16, 256)),
    *_cases("ppo", (256, 128, 128), (4096, 16, 256), reset=True),
    *_cases("world model", (16, 64, 512), (16, 64, 1024), (16, 64, 2048), (16, 64, 4096)),
    *_cases("time series", (32, 96, 64), (64, 365, 64), (256, 365, 128), (512, 96, 256)),
    *_cases("time series", (64, 168, 128), num_layers=2),
    *_cases("speech", (32, 500, 512), (64, 200, 1024)),
    *_cases("speech", (16, 1500, 320), (32, 800, 512), bidirectional=True),
    *_cases("speech", (16, 800, 640), num_layers=2),
    *_cases("language", (32, 1024, 768), (32, 1024, 1024), (32, 1024, 2048)),
    *_cases("language", (32, 1024, 768), num_layers=2),
    *_cases("control", (1, 1, 128), (1, 50, 256), (1, 500, 64)),
]
CPU = [
    *_cases("ppo", (256, 16, 128), (256, 32, 64), (256, 50, 32), (64, 64, 128)),
    *_cases("ppo", (64, 32, 128), reset=True),
    *_cases("world model", (16, 64, 256), (16, 64, 512), (4, 50, 1024)),
    *_cases("time series", (32, 96, 64), (64, 40, 64), (128, 64, 128), (128, 64, 256), (32, 365, 20)),
    *_cases("time series", (32, 96, 100), num_layers=2),
    *_cases("speech", (16, 200, 320), (8, 200, 640)),
    *_cases("speech", (16, 200, 256), bidirectional=True),
    *_cases("language", (8, 64, 768)),
    *_cases("language", (8, 128, 256), num_layers=2),
    *_cases("control", (1, 1, 64), (1, 50, 128), (1, 500, 64), (16, 1, 64)),
]


def cases(gpu: bool) -> Iterator[LayerCase]:
    """Yield the networks for a GPU in the precisions of their families, or those for a CPU, some also in bfloat16."""
    if gpu:
        for precision, families in GPU_PRECISIONS.items():
            yield from (replace(case, precision=precision) for case in GPU if case.family in families)
    else:
        yield from CPU
        for case in CPU:
            if (case.B, case.T, case.H) in CPU_BFLOAT16:
                yield replace(case, precision="bfloat16")
