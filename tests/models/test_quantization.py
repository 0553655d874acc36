"""Linear layers in 8 bits: how far they are from the weights, and that models generate with them."""

from functools import partial

import pytest
import torch
from torch import nn

from models.backbone import SequenceModel
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from models.mixers import RNNMixer
from models.quantization import Int8Linear, is_quantized, quantize


def test_weights_are_rounded_to_half_a_step():
    linear = nn.Linear(50, 7, bias=False)
    linear.weight.data[3] = 0
    linear.weight.data[4] *= 1000
    found = Int8Linear(linear)
    largest = linear.weight.abs().amax(dim=1, keepdim=True)
    assert (found.weight - linear.weight).abs().le(0.5001 * largest / 127).all()
    x = torch.randn(3, 50)
    torch.testing.assert_close(found(x), x @ found.weight.T)


def test_scales_stay_exact_in_other_dtypes():
    found, exact = (Int8Linear(nn.Linear(8, 5, bias=False)) for _ in range(2))
    exact.load_state_dict(found.state_dict())
    found.to(torch.bfloat16)
    assert (found.weight.dtype, found.scale.dtype, found.quantized.dtype) == (torch.bfloat16, torch.float32, torch.int8)
    assert torch.equal(found.weight, exact.weight.bfloat16())


def test_linear_layers_alone_are_quantized():
    model = SequenceModel(11, partial(RNNMixer, function="lstm", num_heads=2), d_model=16, num_blocks=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantize(model)
    assert is_quantized(model)
    gone = {name for name in before if name not in dict(model.named_parameters())}
    layers = ("mixer.gates", "mlp.up", "mlp.down")
    assert gone == {"head.weight", *(f"blocks.{k}.{layer}.weight" for k in range(2) for layer in layers)}
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_text_is_that_of_the_rounded_weights(tmp_path):
    """By the steps of a Decoder; and such a model is not saved as if it could be loaded."""
    torch.manual_seed(0)
    mixer = {"name": "RNNMixer", "function": "slstm"}
    config = FlashRNNConfig(vocab_size=31, d_model=32, num_blocks=2, num_heads=2, mixer=mixer)
    rounded, model = FlashRNNForCausalLM(config).eval(), FlashRNNForCausalLM(config).eval()
    model.load_state_dict(rounded.state_dict())
    quantize(model)
    for layer, linear in zip(model.modules(), rounded.modules(), strict=True):
        if isinstance(layer, Int8Linear):
            linear.weight.data = layer.weight
    ids = torch.randint(1, 31, (2, 5))
    texts = [one.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0) for one in (model, rounded)]
    assert torch.equal(*texts)
    labelled = [one(ids, labels=ids).loss for one in (model, rounded)]
    torch.testing.assert_close(*labelled)
    with pytest.raises(ValueError, match="8-bit weights"):
        model.save_pretrained(tmp_path)
