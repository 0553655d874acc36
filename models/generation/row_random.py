"""Random numbers for sampling that depend only on a row's key: the same in any batch, on any device, in a CUDA graph.

A row has a 32-bit key, to which a constant is added with every token (a Weyl sequence). The random number of a
vocabulary entry is a hash of this key and of the entry's own constant. flashrnn/cuda/decoding/kernels/draw.cuh computes
the same numbers.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

_WEYL = 0x9E3779B9 - 2**32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # Wellons' multipliers for a hash of 32 bits (lowbias32)


def new_seed() -> int:
    """Return a seed for one call, drawn from PyTorch's global generator, so that torch.manual_seed determines it."""
    return int(torch.randint(2**62, ()))


def keys(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a key for each prompt (tokens without padding).

    It is a hash of the seed, the tokens and the number of equal prompts before it.
    """
    before: Counter[bytes] = Counter()
    found = []
    for prompt in prompts:
        digest = hashlib.blake2b(repr(list(prompt)).encode(), digest_size=16).digest()
        times = before[digest]
        before[digest] += 1
        word = hashlib.blake2b(repr((seed, times)).encode() + digest, digest_size=4).digest()
        found.append(int.from_bytes(word, "little", signed=True))
    return found


def constants(vocabulary: int, device: torch.device) -> Tensor:
    """Return a distinct 31-bit constant for each entry, int32 [vocabulary]."""
    # Multiplication by an odd number is one-to-one modulo 2^31; `exponential` mixes all bits of the result.
    entries = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
    return (entries * 0x2C1B3C6D % 2**31).to(torch.int32)


def next_keys_(row_keys: Tensor) -> None:
    """Advance the keys of the rows by one token, in place."""
    row_keys.add_(_WEYL)


def exponential(row_keys: Tensor, entries: Tensor) -> Tensor:
    """Return an exponentially distributed number for each row and vocabulary entry, float32 [B, K].

    Args:
        row_keys: int32 [B, 1].
        entries: the `constants` of the entries, int32 [K] or [B, K].
    """
    x = row_keys ^ entries
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        x ^= x >> shift
        x *= factor
    x ^= x >> 16
    x &= 0x7FFFFFFF
    minus_uniform = x.to(torch.float32).add_(0.5).mul_(-(2.0**-31))  # floats are dense near zero, where races are won
    return minus_uniform.log1p_().neg_()
