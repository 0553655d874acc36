"""Kernels of a language model's decoding step, and of the choice of the next token."""
