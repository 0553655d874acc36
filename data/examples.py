"""Examples of prompts and responses as tokens; only the responses are trained on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data import hub
from data.corpora import local_files
from data.files import read_json_lines
from data.task import IGNORE


class Example(NamedTuple):
    tokens: np.ndarray  # int32 [length]; the last one is the end-of-text token
    scored: np.ndarray  # bool [length], True for tokens to train on


def encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """Return an example as tokens; `where` describes it in error messages."""
    tokens, scored = [], []
    for text, of_response in _pieces(row, tokenizer, where):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        scored += [of_response] * len(ids)
    if not any(scored):
        raise ValueError(f"{where} has no response to train on")
    if tokens[-1] != tokenizer.eos_token_id:
        tokens.append(tokenizer.eos_token_id)
        scored.append(True)
    return Example(np.array(tokens, np.int32), np.array(scored, bool))


def _pieces(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[tuple[str, bool]]:
    """Return the text of an example in parts, each with whether it is a response.

    A prompt ends where the chat template starts a generated answer, so that it is tokenised as in generation.
    """
    messages = _messages(row, where)
    if tokenizer.chat_template is None:
        if "messages" in row:
            raise ValueError(f"{where} has messages, but the tokenizer no chat template: set data.chat_template=FILE")
        yield from ((message["content"], message["role"] == "assistant") for message in messages)
        return
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, whole = (
            tokenizer.apply_chat_template(messages[: number + added], tokenize=False, add_generation_prompt=not added)
            for added in (0, 1)
        )
        if not (before.startswith(done) and whole.startswith(before)):
            raise ValueError(
                f"{where}: the chat template writes a message differently when another one follows, so that responses "
                "cannot be told apart; set data.chat_template to one that does not"
            )
        yield before[len(done) :], False
        yield whole[len(before) :], True
        done = whole


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    if {"prompt", "response"} <= row.keys():
        given = [("user", row["prompt"]), ("assistant", row["response"])]
        messages = [{"role": role, "content": content} for role, content in given]
    elif isinstance(row.get("messages"), list):
        messages = row["messages"]
    else:
        raise ValueError(f"{where} has {', '.join(row)}: expected prompt and response, or messages")
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str) and message.get("role")):
            raise ValueError(f"{where}: {message!r} is not a message: expected a role and a content, both strings")
    return [dict(message) for message in messages]


def read_examples(name: str, subset: str | None, split: str, revision: str | None) -> Iterable[dict[str, Any]]:
    """Return the rows of JSON lines files, or of a dataset on the hub."""
    files = local_files(name)
    if files is None:
        return hub.open_dataset(name, subset, split, revision)
    return (row for file in files for row in read_json_lines(file))


class ExampleRows(Dataset):
    """Maps row numbers [B] to a batch. Each row contains one example or, if `packed`, as many in order as fit.

    The target of a position is the next token. Like a document, an example starts after an end-of-text token. Tokens
    beyond `context_length` are cut off; an example is omitted if this removes its whole response.

    Args:
        tokens: the concatenated tokens of all examples.
        scored: bool, True for tokens to train on.
        lengths: number of tokens of each example.
        context_length: number of tokens per row.
        packed: put several examples into a row, with `reset` where each starts.
        end_of_text: the id of the end-of-text token.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        scored: np.ndarray,
        lengths: np.ndarray,
        context_length: int,
        packed: bool,
        end_of_text: int,
    ):
        self._tokens, self._scored, self._end_of_text = tokens, scored, end_of_text
        self._length, self._packed = context_length, packed
        self.examples, self.tokens = len(lengths), len(tokens)
        self.cut = int((lengths > context_length).sum())
        ends = np.cumsum(lengths)
        starts, ends = ends - lengths, ends - np.maximum(lengths - context_length, 0)
        scored_before = np.concatenate([[0], np.cumsum(scored)])
        answered = scored_before[ends] > scored_before[starts]
        self.left_out = int((~answered).sum())
        self._starts, self._ends = starts[answered], ends[answered]
        self._first = self._first_examples(self._ends - self._starts)

    def _first_examples(self, lengths: np.ndarray) -> np.ndarray:
        """Return the index of the first example of each row, and at the end the number of examples."""
        first, used = [], self._length + 1
        for number, length in enumerate(lengths.tolist()):
            if not self._packed or used + length > self._length:
                first.append(number)
                used = 0
            used += length
        return np.array([*first, len(lengths)])

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = (len(rows), self._length)
        inputs = np.full(shape, self._end_of_text, np.int64)
        labels, reset = np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for place, row in enumerate(rows):
            start = 0
            for example in range(self._first[row], self._first[row + 1]):
                own = slice(self._starts[example], self._ends[example])
                tokens, end = self._tokens[own], start + own.stop - own.start
                inputs[place, start + 1 : end] = tokens[:-1]
                labels[place, start:end] = np.where(self._scored[own], tokens, IGNORE)
                reset[place, start] = True
                start = end
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        return batch | {"reset": torch.from_numpy(reset)} if self._packed else batch

    def prompts(self, number: int) -> list[torch.Tensor]:
        """Return the prompts at the start of the first rows, at most `number`, each int64 [tokens]."""
        batch = self[range(min(number, len(self)))]
        ends = (batch["labels"] != IGNORE).int().argmax(dim=1) + 1
        return [tokens[:end] for tokens, end in zip(batch["input_ids"], ends, strict=True)]
