"""Fused CUDA kernels: tiled by ConstrINT, printed from the cell, compiled by NVRTC when they are first needed."""
