"""What `python -m scripts.benchmark` measures, one file each, and what the measurements share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the checkout, in which `python -m scripts...` runs
RESULTS = ROOT / "docs" / "results"
