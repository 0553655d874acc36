"""Measure what docs/results holds: `python -m scripts.benchmark NAME` writes its JSON there."""

from benchmarks.commands import main

if __name__ == "__main__":
    main()
