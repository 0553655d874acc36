"""Files of prompts, and files of answers in the order of the prompts."""

import json
from pathlib import Path
from typing import Any

EXPECTED = 'expected {"prompt": "..."}'


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON lines file of objects with a string "prompt"; raise ValueError for any other line."""
    try:
        text = file.read_text("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8 ({error}): {EXPECTED} in each line") from error
    return [_prompt(file, number, line) for number, line in enumerate(_lines(text), 1)]


def _lines(text: str) -> list[str]:
    """Split a text at newlines only: JSON may contain other characters at which str.splitlines splits."""
    return text.removesuffix("\n").split("\n") if text else []


def _prompt(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number} is not JSON ({error}): {EXPECTED}") from error
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        raise ValueError(f"{file}, line {number}: {EXPECTED}, found {line[:80]}")
    return content


class AnswerFile:
    """Answers to prompts, written in the order of the prompts.

    The file <name>.settings.json next to it contains the settings, so that answers with different settings are not
    mixed.

    Args:
        file: the file of answers; it may already contain the first answers, of an interrupted command.
        prompts: all lines of the prompt file.
        settings: everything that the answers depend on.

    Raises:
        ValueError: the file contains answers to other prompts or with other settings.
    """

    def __init__(self, file: Path, prompts: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        self._file, self._prompts = file, prompts
        self._early: dict[int, dict[str, Any]] = {}
        self._check_settings(Path(f"{file}.settings.json"), settings)
        self.answered = self._begun()
        """The number of answers in the file."""

    def _check_settings(self, settings_file: Path, settings: dict[str, Any]) -> None:
        if not self._file.exists():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            settings_file.write_text(json.dumps(settings, indent=1) + "\n")
            return
        if not settings_file.exists():
            raise ValueError(f"out={self._file} exists, but was not written by this command: choose another file")
        before = json.loads(settings_file.read_text())
        if other := [f"{key}={before.get(key)}" for key in settings if before.get(key) != settings[key]]:
            raise ValueError(
                f"out={self._file} was started with {' '.join(other)}: use the same settings, or choose another file"
            )

    def _begun(self) -> int:
        """Return the number of answers in the file, and delete an incomplete last one."""
        if not self._file.exists():
            self._file.touch()
            return 0
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self._file.open("r+b") as file:
                file.truncate(len(whole))
        lines = _lines(whole.decode("utf-8"))
        for number, (line, prompt) in enumerate(zip(lines, self._prompts, strict=False), 1):
            if json.loads(line).get("prompt") != prompt["prompt"]:
                raise ValueError(f"{self._file}, line {number} answers another prompt: choose another file for out")
        if len(lines) > len(self._prompts):
            raise ValueError(
                f"{self._file} has {len(lines)} answers to {len(self._prompts)} prompts: choose another file for out"
            )
        return len(lines)

    def add(self, index: int, answer: dict[str, Any]) -> None:
        """Add the answer to the prompt at `index`, and write all answers that are next in order."""
        self._early[index] = self._prompts[index] | answer
        with self._file.open("a", encoding="utf-8") as file:
            while self.answered in self._early:
                file.write(json.dumps(self._early.pop(self.answered), ensure_ascii=False) + "\n")
                self.answered += 1
