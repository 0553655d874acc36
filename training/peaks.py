"""Peak compute and memory bandwidth of GPUs, from NVIDIA's data sheets."""

# FLOP/s of dense matrix products in bfloat16 or float16. (Some data sheets print twice as much, for sparse matrices;
# Lightning's own table mixes the two.) The first key that occurs in the name of the device applies.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}

PEAK_BANDWIDTH = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "A100 SXM4 80GB": 2.039e12}  # bytes/s of HBM


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of the GPU with the name `device`, such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    return _of_device(PEAK_FLOPS, device)


def peak_bandwidth(device: str) -> float | None:
    """Return the peak memory bandwidth of the same GPU in bytes per second; None if unknown."""
    return _of_device(PEAK_BANDWIDTH, device)


def _of_device(table: dict[str, float], device: str) -> float | None:
    words = f" {device} ".replace("-", " ")
    return next((peak for name, peak in table.items() if f" {name} " in words), None)
