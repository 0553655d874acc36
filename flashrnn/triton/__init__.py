"""Fused kernels in Triton: GPUs of every vendor that Triton compiles for."""
