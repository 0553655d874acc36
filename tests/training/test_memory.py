"""Predicted memory per GPU."""

import pytest

from tests.tiny_runs import config
from training.memory import predict


def predicted(*overrides):
    return predict(config("experiment=slimpajama_1b", "model.num_blocks=2", "run_dir=.", *overrides))


def test_weights_gradients_and_optimizer_are_sharded():
    eight, one = predicted(), predicted("trainer.devices=1")
    for name in ("weights", "gradients", "optimizer"):
        assert one[name] == pytest.approx(8 * eight[name])
    assert one["activations"] == eight["activations"]
    parameters = one["weights"] * 2**30 / 4
    assert parameters == pytest.approx(2 * 50257 * 2048 + 2 * 12 * 2048**2, rel=0.03)


def test_activations_depend_on_batch_size_and_checkpointing():
    whole = predicted()
    assert predicted("data.batch_size=32")["activations"] == pytest.approx(2 * whole["activations"], rel=0.01)
    assert whole["activations"] * 2**30 == pytest.approx(2 * 16 * 1024 * 2048 * 44, rel=0.2)  # bytes per unit
    less = predicted("activation_checkpointing=true")["activations"]
    assert less == pytest.approx(whole["activations"] / 2 + 2 * 16 * 1024 * 2048 * 4 / 2**30, rel=0.01)


def test_data_without_a_context_length_is_an_error():
    with pytest.raises(ValueError, match=r"data\.context_length"):
        predict(config("experiment=parity", "run_dir=."))


def test_unknown_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=r"model\.vocab_size=NUMBER"):
        predict(config("experiment=text_tiny", "run_dir=."))
