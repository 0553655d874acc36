"""A GPT-2 backbone in which any mixer can take the place of attention."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import fused_blocks
from .block import Block
from .loss import linear_cross_entropy
from .mixers.step_context import StepContext

# Output layers of the MLP and of mixers, some of which contain a layer of another package.
_WRITES_RESIDUAL = ("mlp.down", "mixer.out", "mixer.layer.out_proj", "mixer.layer.o_proj")
States = list[tuple[Tensor, ...] | None]  # one tuple per block, defined by its mixer; None: no state yet


def carries_state(mixer: nn.Module) -> bool:
    """Return whether the mixer's state is carried over between consecutive batches of a text."""
    return getattr(mixer, "carries_state", True)


def check_ids(name: str, ids: Tensor, number: int, ignore: int | None = None) -> None:
    """Raise ValueError if `ids` has a value other than `ignore` outside 0 ... number - 1.

    On a GPU this waits for the device. `name` is the name of the tensor in the message.
    """
    outside = (ids < 0) | (ids >= number)
    if ignore is not None:
        outside &= ids != ignore
    if outside.any():
        raise ValueError(
            f"{name} contains {ids[outside][0].item()}, but the model knows only 0 to {number - 1}: "
            "build the model with the vocab_size and num_classes of its data"
        )


def check_not_empty(input_ids: Tensor) -> None:
    """Raise unless `input_ids` are [B, T] with at least one token in each row."""
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids have shape {list(input_ids.shape)}: expected [B, T] with T > 0")


class SequenceModel(nn.Module):
    """A GPT-2 backbone with any mixer: token embedding, residual blocks, norm and untied output layer.

    It has no positional embedding.

    Args:
        vocab_size: number of token ids.
        mixer: builds the mixer of one block when called as `mixer(d_model, block_index=..., num_blocks=...)`, for
            example `functools.partial(RNNMixer, function="slstm", num_heads=12)`. With `pattern`, a dictionary of such
            builders by name.
        num_classes: size of the output layer; None means `vocab_size`, as in a language model.
        d_model: width of the model.
        num_blocks: number of residual blocks.
        num_heads: passed to `mixer`, unless it is None or `mixer` is a partial with its own value.
        embedding_std: standard deviation of the initial embeddings; None means that of the other weights.
        mlp: add an MLP after the mixer of every block.
        pattern: names of the mixers of successive blocks, repeated until there are `num_blocks`:
            `["lstm", "lstm", "attention"]` uses attention in every third block.

    If the attribute `checkpoint_blocks` is True, training stores only the input of each block and recomputes the block
    in the backward pass. This saves memory and costs one more forward pass.

    Weights are initialised as in GPT-2: from a normal distribution with standard deviation sqrt(2 / 5d), about 0.02 at
    d = 768, divided by sqrt(2 num_blocks) for weights that write to the residual stream. A mixer with a method
    `init_weights` can then change its own weights.
    """

    def __init__(
        self,
        vocab_size: int,
        mixer: Callable[..., nn.Module] | Mapping[str, Callable[..., nn.Module]],
        num_classes: int | None = None,
        d_model: int = 768,
        num_blocks: int = 12,
        num_heads: int | None = None,
        embedding_std: float | None = None,
        mlp: bool = True,
        pattern: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"vocab_size": vocab_size, "d_model": d_model, "num_blocks": num_blocks}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be positive")
        if embedding_std is not None and embedding_std < 0:
            raise ValueError(f"embedding_std={embedding_std} must not be negative")
        self.checkpoint_blocks = False
        self.vocab_size = vocab_size
        self.num_classes = num_classes or vocab_size
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            Block(d_model, build(d_model, **_heads(build, num_heads), block_index=index, num_blocks=num_blocks), mlp)
            for index, build in enumerate(_mixers_of_blocks(mixer, pattern, num_blocks))
        )
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, self.num_classes, bias=False)
        self._init_weights(embedding_std)

    def _init_weights(self, embedding_std: float | None) -> None:
        num_blocks, d_model = len(self.blocks), self.embedding.embedding_dim
        std = math.sqrt(2 / (5 * d_model))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes_residual = name.endswith(_WRITES_RESIDUAL)
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * num_blocks) if writes_residual else std)
            elif isinstance(module, nn.LSTM):  # as RNNMixer initialises the same cell
                nn.init.normal_(module.weight_ih_l0, std=std)
                nn.init.zeros_(module.bias_ih_l0)
        nn.init.normal_(self.embedding.weight, std=std if embedding_std is None else embedding_std)
        for block in self.blocks:
            if hasattr(block.mixer, "init_weights"):
                block.mixer.init_weights()

    def forward(
        self, input_ids: Tensor, states: States | None = None, reset: Tensor | None = None, return_states: bool = False
    ) -> Tensor | tuple[Tensor, States]:
        """Return the logits of every position and, with `return_states`, the states after the last position.

        Args:
            input_ids: int64 [B, T], token ids.
            states: the states returned by the previous call; None at the start of a sequence.
            reset: bool [B, T], True at the first token of each document.

        Returns:
            logits [B, T, num_classes], or (logits, states).
        """
        x, new_states = self.hidden_states(input_ids, states, reset)
        logits = self.head(x)
        return (logits, new_states) if return_states else logits

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        reset: Tensor | None = None,
        states: States | None = None,
        return_states: bool = False,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, States]:
        """Return the mean cross-entropy and which predictions are correct, without ever storing all logits.

        Args:
            input_ids: int64 [B, T].
            labels: int64 [B, T], models.loss.IGNORE where nothing is scored.
            reset: as in `forward`.
            states: the states returned by the previous call; None at the start of a sequence.
            return_states: also return the states after the last position, detached.

        Returns:
            (loss, right) or (loss, right, states): the mean loss over the scored labels, a scalar; bool [B, T], True
            where the largest logit is that of the label; and the states.
        """
        x, new_states = self.hidden_states(input_ids, states, reset)
        loss, right = linear_cross_entropy(x.flatten(0, 1), self.head.weight, labels.flatten())
        right = right.view_as(labels)
        if not return_states:
            return loss, right
        return loss, right, [tuple(part.detach() for part in state) for state in new_states]

    def carried(self, states: States) -> States:
        """Return the states to carry over to the next batch, with None for mixers that carry nothing."""
        return [state if carries_state(block.mixer) else None for block, state in zip(self.blocks, states, strict=True)]

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, states: States | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Read a prompt without gradients; return the logits of its last position [B, num_classes] and the states.

        The arguments are those of `forward`. A long prompt is read in chunks, to need only the memory of one chunk.
        """
        check_not_empty(input_ids)
        B, T = input_ids.shape
        plain = fused_blocks.served(self)
        hidden_states = self.hidden_states if plain is None else partial(self.fused_hidden_states, plain)
        for start in range(0, T, size := _chunk_size(B)):
            part = slice(start, start + size)
            x, states = hidden_states(input_ids[:, part], states, None if reset is None else reset[:, part])
            x = x[:, -1].clone()  # frees the other positions before the next chunk is read
        return fused_blocks.logits(x, self.head), states

    def fused_hidden_states(
        self,
        plain: list[fused_blocks.PlainBlock],
        input_ids: Tensor,
        states: States | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        """Return the same as `hidden_states`, without gradients, in fewer kernels.

        `plain` is what `fused_blocks.served` returns for this model; the other arguments are those of `hidden_states`.
        """
        states = [None] * len(plain) if states is None else states
        return fused_blocks.hidden_states(self.embedding(input_ids), plain, self.norm, states, reset)

    @torch.no_grad()
    def step(self, tokens: Tensor, states: States, context: StepContext) -> tuple[Tensor, States]:
        """Read one more token of each sequence; return its logits [B, num_classes] and the new states.

        Args:
            tokens: int64 [B].
            states: for each block, the state that its mixer's method `step` takes (see `models.mixers`).
            context: the position of each sequence.
        """
        plain = fused_blocks.served(self)
        if plain is not None:
            x, new_states = self.fused_hidden_states(plain, tokens[:, None], states)
            return fused_blocks.logits(x[:, 0], self.head), new_states
        x = self.embedding(tokens)
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.step(x, state, context)
            new_states.append(state)
        return fused_blocks.logits(self.norm(x), self.head), new_states

    def flops_per_token(self, T: int) -> float:
        """Return the floating-point operations per token of a forward and backward pass over sequences of T tokens.

        As in PaLM (arXiv 2204.02311, appendix B), these are 6 per parameter, without the embedding and with the
        recurrent matrices, plus the mixers' own `flops_per_token(T)` for operations that involve no parameters, such as
        the scores and weighted sums of attention. Recomputation is not counted.
        """
        parameters = sum(parameter.numel() for parameter in self.parameters()) - self.embedding.weight.numel()
        mixers = (block.mixer for block in self.blocks)
        return 6.0 * parameters + sum(m.flops_per_token(T) for m in mixers if hasattr(m, "flops_per_token"))

    def hidden_states(self, input_ids: Tensor, states: States | None, reset: Tensor | None) -> tuple[Tensor, States]:
        """Return the input of the output layer [B, T, d_model] and the states after the last position.

        The arguments are those of `forward`.
        """
        check_not_empty(input_ids)
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            check_ids("input_ids", input_ids, self.vocab_size)
        if states is None:
            states = [None] * len(self.blocks)
        elif len(states) != len(self.blocks):
            raise ValueError(f"states of {len(states)} blocks were given, but the model has {len(self.blocks)} blocks")
        x = self.embedding(input_ids)
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = self._run(block, x, state, reset)
            if not isinstance(state, tuple):
                mixer, kind = type(block.mixer).__name__, type(state).__name__
                raise TypeError(f"{mixer} returned a {kind} as its state; expected a tuple of tensors, even for one")
            new_states.append(state)
        return self.norm(x), new_states

    def _run(
        self, block: Block, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not (self.checkpoint_blocks and torch.is_grad_enabled()):
            return block(x, state, reset)
        return checkpoint(block, x, state, reset, use_reentrant=False, preserve_rng_state=False)


def _mixers_of_blocks(
    mixer: Callable[..., nn.Module] | Mapping[str, Callable[..., nn.Module]],
    pattern: Sequence[str] | None,
    num_blocks: int,
) -> list[Callable[..., nn.Module]]:
    """Return the builder of each block's mixer."""
    if pattern is not None and not isinstance(mixer, Mapping):
        raise ValueError(
            f"pattern={pattern} needs several mixers by name, and the model has one mixer (see model=hybrid)"
        )
    if isinstance(mixer, Mapping) and (pattern is None or isinstance(pattern, str)):
        raise ValueError(f"pattern={pattern}: expected a list of mixer names out of {', '.join(mixer)}")
    mixers = {"": mixer} if pattern is None else mixer
    names = [""] if pattern is None else list(pattern)
    if unknown := [name for name in names if name not in mixers]:
        raise ValueError(f"pattern={names}: unknown mixer {unknown[0]!r}; the model has {', '.join(mixers)}")
    if not 1 <= len(names) <= num_blocks:
        raise ValueError(
            f"pattern={names} has {len(names)} mixers for num_blocks={num_blocks}: "
            "expected at least one mixer, and at least one block for each"
        )
    for name in names:
        if not callable(mixers[name]):
            raise TypeError(
                f"mixer={mixers[name]!r}: expected a callable that builds a mixer, "
                "such as functools.partial(models.mixers.RNNMixer, function='lstm', num_heads=12)"
            )
    return [mixers[names[index % len(names)]] for index in range(num_blocks)]


def _heads(build: Callable[..., nn.Module], num_heads: int | None) -> dict[str, int]:
    """Return the keyword num_heads for the builder, unless it has its own."""
    own = getattr(build, "keywords", {}).get("num_heads")
    return {} if num_heads is None or own is not None else {"num_heads": num_heads}


def _chunk_size(batch: int) -> int:
    """Return how many positions are read at once: enough work for a GPU, but few MiB of activations per sequence."""
    return max(128, min(1024, 16384 // batch))
