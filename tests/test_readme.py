"""The README's Python code runs."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    scope: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["out"].shape == (8, 100, 64)
    assert scope["rnn"](scope["torch"].randn(5, 2, 32))[0].shape == (5, 2, 64)
