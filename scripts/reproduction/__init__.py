"""What `python -m scripts.reproduce` regenerates, one file for each result of the paper, and what these share."""
