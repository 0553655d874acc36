"""Missing results of a GPU are found and measured in order within a time limit."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks import RESULTS
from reproduction import ENTRIES, record
from scripts import benchmark, reproduce, results
from tests.tiny_runs import config


def leave(folder, name, commit):
    (folder / f"{name}.json").write_text(json.dumps({"commit": commit, "rows": []}))


def test_absent_results_and_those_of_other_commits_are_missing(tmp_path):
    leave(tmp_path, "calls", "abc")
    leave(tmp_path, "step", "earlier")
    names = [entry.file for entry in record.missing(tmp_path, "abc")]
    assert names == [entry.file for entry in record.RECORD if entry.file != "calls"]


INDEX = re.findall(r"\| `((?:benchmark|reproduce) .*)` \|$", (RESULTS / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", sorted({*INDEX, *(entry.command for entry in record.RECORD)}))
def test_commands_of_results_are_valid(command):
    module, *words = shlex.split(command)
    arguments = {"benchmark": benchmark, "reproduce": reproduce}[module].arguments(words)
    asked = config(*arguments, name=module)
    if module == "reproduce":
        assert asked.name in ENTRIES
        config(*asked.overrides)


def test_commands_run_in_order_until_the_time_limit(monkeypatch):
    events = []

    class Process:
        def __init__(self, command, cwd):
            self.name = command[3]
            events.append(f"begin {self.name}")

        def wait(self, timeout=None):
            if self.name == "long" and timeout is not None:
                raise subprocess.TimeoutExpired("long", timeout)
            return 0

        def send_signal(self, number):
            events.append(f"signal {self.name}")

    monkeypatch.setattr(record.subprocess, "Popen", Process)
    entries = [record.Entry(name, f"benchmark {name}") for name in ("first", "long", "never")]
    assert [entry.file for entry in record.measure(entries, 3600)] == ["first"]
    assert events == ["begin first", "begin long", "signal long"]


def test_command_lists_missing_results(monkeypatch, capsys, tmp_path):
    leave(tmp_path, "calls", "abc")
    monkeypatch.setattr(sys, "argv", ["results", "list=true"])
    monkeypatch.setattr("benchmarks.RESULTS", tmp_path.parent)
    monkeypatch.setattr("benchmarks.results.gpu_folder", lambda: tmp_path.name)
    monkeypatch.setattr("benchmarks.results.checkout", lambda: "abc")
    results.main()
    printed = capsys.readouterr().out
    assert f"1 of {len(record.RECORD)} results" in printed
    assert "missing: sweep" in printed
