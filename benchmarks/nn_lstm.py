"""PyTorch's nn.LSTM, timed in many ways, because its published time depends on them."""

from collections.abc import Iterator

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
EVAL, WHOLE = "none, in eval mode", "of the parameters and inputs"
GRADIENTS = (EVAL, "none, in training mode", "of the inputs", "of the parameters", WHOLE)
WAYS = (
    *(("float16", batch_first, gradients) for batch_first in (False, True) for gradients in reversed(GRADIENTS)),
    *((dtype, False, gradients) for dtype in reversed(DTYPES) if dtype != "float16" for gradients in (WHOLE, EVAL)),
)
"""Float16 in all ways, because cuDNN is several times slower in the other dtypes, whatever else is changed."""
_CALLS = 20


def rows() -> Iterator[dict]:
    """Milliseconds of nn.LSTM with 768 units on 16 sequences of 1024 steps, including the input product, for several
    dtypes, memory layouts (batch-major or time-major) and sets of gradients; float16 in all combinations, other dtypes
    in two. ms: measured by events on the device, with the host ahead and an empty L2 cache. wall_ms: consecutive calls,
    measured by the host's clock. input_ms: the input product alone, which our tables do not include."""
    case = Case("lstm", 1, HIDDEN, 16)
    for dtype, batch_first, gradients in WAYS:
        found = measured(case, *DTYPES[dtype], batch_first, gradients)
        yield {"dtype": dtype, "batch_first": batch_first, "gradients": gradients} | found


def measured(case: Case, dtype: torch.dtype, rounded: bool, batch_first: bool, gradients: str) -> dict:
    """Return the times of a layer, and that of the input product that they include."""
    training, of_inputs = gradients.startswith("of"), gradients.endswith("inputs")
    options = {"device": "cuda", "dtype": dtype}
    layer = nn.LSTM(case.D, case.D, batch_first=batch_first, **options).train(gradients != EVAL)
    linear = nn.Linear(case.D, 4 * case.D, **options)
    for module in (layer, linear):
        module.requires_grad_("parameters" in gradients)
    shape = (case.B, case.T, case.D) if batch_first else (case.T, case.B, case.D)
    x = torch.randn(shape, requires_grad=of_inputs, **options)
    with tf32(rounded):
        times = {}
        for name, module in (("layer", layer), ("product", linear)):
            inputs = [leaf for leaf in (*module.parameters(), x) if leaf.requires_grad]

            def forward(module=module) -> Outputs:
                y = module(x)
                return y[0] if isinstance(y, tuple) else y

            times[name] = measure(forward, inputs, training, QUICK)["ms"]
            if name == "layer":
                call = call_of(forward, inputs, training)
                wall = round(1e3 * seconds(call, _CALLS) / _CALLS, 4)
        return {"ms": times["layer"], "wall_ms": wall, "input_ms": times["product"]}
