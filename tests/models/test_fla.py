import importlib.util
import sys

import pytest
import torch

from models.mixers.fla import FLAMixer


def test_missing_package_is_an_error_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"GatedDeltaNet .*pip install '\.\[fla\]'"):
        FLAMixer(64, 2)


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is not installed")
def test_missing_gpu_and_unknown_layer_are_an_error():
    with pytest.raises(ValueError, match=r"GatedDeltaNet .*GPU"):
        FLAMixer(64, 2, head_dim=32)(torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"layer=DeltaNat: fla\.layers"):
        FLAMixer(64, 2, layer="DeltaNat")
