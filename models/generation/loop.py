"""Generation for one batch: run a Decoder until all sequences have ended."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from .decoder import SYNC_INTERVAL, Decoder
from .request import Request
from .transfers import PendingTokens


def tokens(decoder: Decoder, steps: int, exact: bool = False) -> Iterator[Tensor]:
    """Yield the next `steps` tokens of all rows in groups, int64 [steps of the group, rows], on the host.

    On a GPU the host reads tokens while the next SYNC_INTERVAL steps run. If the caller stops early, the states are
    therefore ahead of the tokens it has received. With `exact`, the host waits for every token, and the states match.
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
    """Return the prompts with the generated text after them, int64 [B, length], as the loop of transformers does.

    Args:
        decoder: a decoder whose first rows have been loaded with the prompts.
        first: the first tokens, which `decoder.load` returned.
        input_ids: int64 [B, T], the prompts.
        request: when to stop.
        padding: the token that fills a text after its end.
        streamer: receives the tokens of every step, or None.
        exact: stop the decoder exactly where the text ends, see `tokens`.
    """
    B, T = input_ids.shape
    ends, going, columns = set(request.ends), set(range(B)), []
    given = input_ids if request.others else None  # on the device, where users' criteria may keep tensors
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
