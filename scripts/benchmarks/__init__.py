"""What `python -m scripts.benchmark` measures, one file each, and what the measurements share."""

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"
