"""Text generation: sampling, the decoding step as a CUDA graph on static buffers, and the loops around it."""
