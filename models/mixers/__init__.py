"""Mixers: the part of a block that moves information along time.

A mixer is an nn.Module built as `Mixer(d_model, num_heads=..., block_index=..., num_blocks=...)` and called as

    forward(x [B, T, d], state=None, reset=None) -> (y [B, T, d], new_state)

`state` is a tuple of tensors, batch first, with everything that the mixer remembers of earlier calls. Calling the mixer
on consecutive parts of a sequence, each with the state returned for the previous part, gives the same result as one
call on the whole sequence. `reset` [B, T] is True at the first token of each document: outputs from there on do not
depend on anything before it. A state of zeros is the state before the first token.

Class variables state what a mixer cannot do. A mixer with `trains_with_resets = False` or `trains_with_states = False`
cannot be trained with `reset` or `state`. A mixer with `carries_state = False` does not carry its state from batch to
batch, because the state consists of the tokens themselves; its initial state need not be zeros.

A model can generate text in CUDA graphs if its mixers have a method that processes one token without gradients,

    step(x [B, d], state, context, residual [B, d]) -> (residual + y [B, d], new_state)

and computes the same as `forward` with T = 1. `models.mixers.stepwise.step_by_forward` is such a method for any mixer
whose state has a constant size. A mixer that looks back at earlier tokens keeps them in a cache of fixed size (see
`AttentionMixer.empty_cache`) and finds their positions in `context`, a `models.mixers.step_context.StepContext`.
"""

from .attention import AttentionMixer
from .nn_lstm import NNLSTMMixer
from .rnn import RNNMixer

__all__ = ["AttentionMixer", "NNLSTMMixer", "RNNMixer"]
