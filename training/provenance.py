"""The commit that a result was made with."""

import shutil
import subprocess
from pathlib import Path


def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" appended if there are changes or untracked code.

    Return None without git or its history.
    """
    if shutil.which("git") is None:
        return None
    described = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")  # tags
    added = _git("ls-files", "--others", "--exclude-standard", "--", ":/*.py", ":/*.yaml")
    return f"{described.removesuffix('-dirty')}-dirty" if described and added else described or None


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def short(commit: str) -> str:
    """Return a commit as it is shown on pages: twelve digits, and "-dirty" if there were changes."""
    digits, dirty, _ = commit.partition("-dirty")
    return digits[:12] + dirty
