"""Fused kernels in Triton, for GPUs of all vendors that Triton supports."""
