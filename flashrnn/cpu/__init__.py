"""The fused CPU kernel: the whole time loop of a head and some sequences, compiled by numba."""
