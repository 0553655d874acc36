"""Calls of FlashRNN 1.0.8 on a GPU, by the backends with its names."""

import pytest
import torch

from flashrnn.compat import nxai
from tests.compat.problem import AXES, OTHERS, Call, random_call, results
from tests.tolerances import assert_close

DEVICE = "cuda"


@pytest.mark.parametrize("layouts", [AXES, *OTHERS], ids=lambda layouts: "-".join(layouts.values()))
@pytest.mark.parametrize("backend", ["cuda_fused", "cuda", "triton_fused"])
@pytest.mark.parametrize("function", ["lstm", "gru"])
def test_kernels_in_all_layouts(function, backend, layouts):
    call = Call(*(x.to(DEVICE) for x in random_call(function, torch.bfloat16, D=32))).permuted(layouts)
    config = nxai.FlashRNNConfig(backend, function, **layouts)
    exact = nxai.FlashRNNConfig("vanilla", function, **layouts)
    expected = results(nxai.flashrnn, Call(*(x.double() for x in call)), config=exact)
    peers = results(nxai.flashrnn, call, config=exact)
    assert_close(results(nxai.flashrnn, call, config=config), expected, torch.bfloat16, peers)
