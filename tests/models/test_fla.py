import importlib.util
import sys

import pytest
import torch

from models.mixers.fla import FLAMixer


def test_without_the_package_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"GatedDeltaNet .*pip install '\.\[fla\]'"):
        FLAMixer(64, 2)


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is not installed")
def test_it_wants_a_gpu_and_a_layer_that_there_is():
    with pytest.raises(ValueError, match=r"GatedDeltaNet .*GPU"):
        FLAMixer(64, 2, head_dim=32)(torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"layer=DeltaNat: fla\.layers"):
        FLAMixer(64, 2, layer="DeltaNat")
