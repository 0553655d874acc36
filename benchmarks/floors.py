"""What a bare forward step of an LSTM takes on an H100, from probes that did nothing else.

One multiprocessor alone: ldmatrix, four products one after the other, the element-wise step and a barrier. A cluster:
handing h to all of its blocks, by plain stores and a full barrier; kernels that do without can be under this. Any:
reading x and writing h, at the bandwidth of the data sheet.
"""

from benchmarks.cases import Case

GPU = "H100"
_LATENCY = {192: 0.17, 512: 0.54, 830: 0.61}  # µs in one block, 8 and 16, by the largest head that they hold
_BANDWIDTH = 3.35e6  # bytes per µs


def forward_floor(case: Case) -> float:
    """Return µs per time step, in 16 bit; heads of up to 830 units."""
    rows = 4 + 1  # the gates' inputs, and h
    bytes_moved = 2 * case.B * case.N * case.D * rows
    return max(next(us for held, us in _LATENCY.items() if held >= case.D), bytes_moved / _BANDWIDTH)
