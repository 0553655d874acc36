"""Text token by token: the choice of a token, the step on fixed buffers as a CUDA graph, and loops over it."""
