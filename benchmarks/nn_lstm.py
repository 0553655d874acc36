"""PyTorch's nn.LSTM, timed in every way that its time can mean."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn

from benchmarks.cases import HIDDEN, Case
from benchmarks.timing import QUICK, Outputs, call_of, measure, seconds, tf32

# The dtype, and whether cuDNN may round products of float32 to TF32.
DTYPES = {
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "float32 with TF32": (torch.float32, True),
}
GRADIENTS = ("none, in eval mode", "none, in training mode", "of the parameters", "of the parameters and inputs")
_CALLS = 20


def rows() -> Iterator[dict]:
    """Milliseconds of nn.LSTM, 768 units, 16 sequences of 1024 steps, with the product of its inputs: by its dtype,
    whether the batch or time comes first in memory, and which gradients are computed. ms: by events on the device, for
    which the host is ahead and the L2 cache empty. wall_ms: of calls one after the other, by the host's clock.
    input_ms: that product alone, which our tables leave out."""
    case = Case("lstm", 1, HIDDEN, 16)
    for dtype, batch_first, gradients in product(DTYPES, (False, True), GRADIENTS):
        found = measured(case, *DTYPES[dtype], batch_first, gradients)
        yield {"dtype": dtype, "batch_first": batch_first, "gradients": gradients} | found


def measured(case: Case, dtype: torch.dtype, rounded: bool, batch_first: bool, gradients: str) -> dict:
    """Return the times of a layer, and of the product with the inputs that they include."""
    training, of_inputs = gradients.startswith("of"), gradients.endswith("inputs")
    options = {"device": "cuda", "dtype": dtype}
    layer = nn.LSTM(case.D, case.D, batch_first=batch_first, **options).train("eval" not in gradients)
    linear = nn.Linear(case.D, 4 * case.D, **options)
    shape = (case.B, case.T, case.D) if batch_first else (case.T, case.B, case.D)
    x = torch.randn(shape, requires_grad=of_inputs, **options)
    with tf32(rounded):
        times = {}
        for name, module in (("layer", layer), ("product", linear)):
            inputs = [*module.parameters(), *([x] if of_inputs else [])]

            def forward(module=module) -> Outputs:
                y = module(x)
                return y[0] if isinstance(y, tuple) else y

            times[name] = measure(forward, inputs, training, QUICK)["ms"]
            if name == "layer":
                call = call_of(forward, inputs, training)
                wall = round(1e3 * seconds(call, _CALLS) / _CALLS, 4)
        return {"ms": times["layer"], "wall_ms": wall, "input_ms": times["product"]}
