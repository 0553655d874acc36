"""What `python -m scripts.benchmark` measures, one file each, and what the measurements share."""
