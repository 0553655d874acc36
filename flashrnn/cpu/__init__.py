"""The fused CPU kernel: the whole time loop of one head and a tile of sequences, compiled by numba."""
