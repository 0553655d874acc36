"""The measurements of `python -m scripts.benchmark`, one file each, and code that they share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # root of the checkout, where `python -m scripts...` runs
RESULTS = ROOT / "docs" / "results"
