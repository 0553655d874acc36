"""Mixers: the part of a block that moves information along time.

A mixer is an nn.Module built as `Mixer(d_model, num_heads=..., block_index=..., num_blocks=...)` and called as

    forward(x [B, T, d], state=None, reset=None) -> (y [B, T, d], new_state)

`state` is a tuple of tensors with the batch first: what the mixer remembers of earlier calls. A sequence in pieces,
each with the state that the previous piece returned, gives the same as the whole sequence. `reset` [B, T] is True where
a new document starts: outputs from there on do not depend on anything before. A state of zeros is that before the first
token.

Class variables say what a mixer cannot do. With `trains_with_resets = False` or `trains_with_states = False` it cannot
be trained with `reset` or `state`. With `carries_state = False` it carries no state from batch to batch, because its
state is the tokens themselves; zeros need not be a state then.

Text is generated in CUDA graphs by models whose mixers have a method for one token, without gradients,

    step(x [B, d], state, context, residual [B, d]) -> (residual + y [B, d], new_state)

with the results of `forward` for T = 1. `models.mixers.stepwise.step_by_forward` is such a method for any mixer with a
state of constant size. A mixer that looks back at tokens keeps them in a cache of constant size (see
`AttentionMixer.empty_cache`) and finds positions in `context`, a `models.mixers.step_context.StepContext`.
"""

from .attention import AttentionMixer
from .nn_lstm import NNLSTMMixer
from .rnn import RNNMixer

__all__ = ["AttentionMixer", "NNLSTMMixer", "RNNMixer"]
