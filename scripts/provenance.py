"""Where a number comes from."""

import shutil
import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of this checkout, "-dirty" behind it if there are changes; None without git or its history."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # tags
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or None


def short(commit: str) -> str:
    """A commit as pages show it: twelve digits, and whether there were changes."""
    digits, dirty, _ = commit.partition("-dirty")
    return digits[:12] + dirty
