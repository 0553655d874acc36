"""Generate for one batch: run a Decoder until all of its sequences have ended."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from .decoder import SYNC_INTERVAL, Decoder
from .request import Request
from .transfers import PendingTokens


def tokens(decoder: Decoder, steps: int, exact: bool = False) -> Iterator[Tensor]:
    """Yield the next tokens of all rows, int64 [some steps, rows] on the host, until there are `steps` of them.

    On a GPU the host reads tokens while the next SYNC_INTERVAL steps run. If the caller stops early, the states have
    read more tokens than it has seen. With `exact`, the host waits for every token, and the states match.
    """
    exact = exact or decoder.synchronous
    before = None
    while steps > 0:
        number = 1 if exact else min(SYNC_INTERVAL, steps)
        steps -= number
        now = decoder.advance(number)
        if exact:
            yield now.read()
            continue
        if before is not None:
            yield before.read()
        before = now
    if before is not None:
        yield before.read()


def complete(
    decoder: Decoder,
    first: PendingTokens,
    input_ids: Tensor,
    request: Request,
    padding: int,
    streamer: BaseStreamer | None,
    exact: bool,
) -> Tensor:
    """Return the prompts and the text generated after them, int64 [B, length], as transformers' loop does.

    Args:
        decoder: has been loaded with the prompts, in its first rows.
        first: the tokens that it chose then.
        input_ids: int64 [B, T], the prompts.
        request: when to end.
        padding: the token that a text is filled up with after its end.
        streamer: gets the tokens of every step.
        exact: stop the decoder where the text ends.
    """
    B, T = input_ids.shape
    ends, going, columns = set(request.ends), set(range(B)), []
    given = input_ids if request.others else None  # on the device, where criteria of users may have their tensors
    for column in _columns(decoder, first, B, request.max_length - T, exact):
        if len(going) < B and ends:
            column = [token if row in going else padding for row, token in enumerate(column)]
        columns.append(column)
        if streamer is not None:
            streamer.put(torch.tensor(column))
        if ends:
            going -= {row for row in going if column[row] in ends}
        if request.others:
            given = torch.cat((given, torch.tensor(column, device=given.device)[:, None]), dim=1)
            going -= set(request.others(given, None).nonzero()[:, 0].tolist())
        if not going:
            break
    if streamer is not None:
        streamer.end()
    return torch.cat((input_ids, torch.tensor(columns, device=input_ids.device).T), dim=1)


def _columns(decoder: Decoder, first: PendingTokens, batch: int, steps: int, exact: bool) -> Iterator[list[int]]:
    """Yield the tokens of the first `batch` rows, step by step."""
    yield from first.read().tolist()
    for chosen in tokens(decoder, steps - 1, exact):
        yield from chosen[:, :batch].tolist()
