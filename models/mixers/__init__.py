"""Mixers: the part of a block that moves information along time.

A mixer is an nn.Module built as `Mixer(d_model, num_heads=..., block_index=..., num_blocks=...)` and called as

    forward(x [B, T, d], state=None, reset=None) -> (y [B, T, d], new_state)

`state` is a tuple of tensors with the batch first: what the mixer remembers of earlier calls. Feeding a sequence in
pieces, each with the state that the previous piece returned, gives the same as feeding it at once. `reset` [B, T] is
True where a new document starts: nothing from before such a step is seen at it or after it. A state of zeros is that
before the first token.

Class variables say what a mixer cannot do: it cannot be trained with `reset` (`trains_with_resets = False`) or with
`state` (`trains_with_states = False`); it carries no state from one batch of text to the next, because its state is the
tokens themselves (`carries_state = False`; zeros need not be a state then); it starts a sequence faster than it goes on
with one (`reads_whole = True`), so that prompts are not read in pieces.

Text is generated in CUDA graphs by models whose mixers have a method for one token, without gradients,

    step(x [B, d], state, context, residual [B, d]) -> (residual + y [B, d], new_state)

with the results of `forward` for T = 1. `models.mixers.stepwise.step_by_forward` is such a method for any mixer whose
state has the same size at all times. One that looks back at tokens keeps them in a cache of fixed size (see
`AttentionMixer.empty_cache`) and finds positions in `context`, a `models.mixers.step_context.StepContext`.
"""

from .attention import AttentionMixer
from .nn_lstm import NNLSTMMixer
from .rnn import RNNMixer

__all__ = ["AttentionMixer", "NNLSTMMixer", "RNNMixer"]
