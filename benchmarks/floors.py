"""Lower bounds for the time of a forward step of an LSTM on an H100, measured by kernels that do nothing else.

For a single multiprocessor, the bound is the time of ldmatrix, four dependent products, the element-wise step and a
barrier. For a cluster, it is the time of sending h to all blocks by plain stores and a full barrier; kernels that avoid
these can be faster. In all cases, reading x and writing h takes time at the bandwidth in the data sheet.
"""

from benchmarks.cases import Case

GPU = "H100"
_LATENCY = {192: 0.17, 512: 0.54, 830: 0.61}  # µs for 1, 8 and 16 blocks, by the largest head that fits
_BANDWIDTH = 3.35e6  # bytes per µs


def forward_floor(case: Case) -> float:
    """Return the lower bound in µs per time step for 16-bit types and heads of up to 830 units."""
    rows = 4 + 1  # the inputs of the gates, and h
    bytes_moved = 2 * case.B * case.N * case.D * rows
    return max(next(us for held, us in _LATENCY.items() if held >= case.D), bytes_moved / _BANDWIDTH)
