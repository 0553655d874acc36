"""Backend `cuda`: heads of any size; R is read from the L2 cache or from memory at every step."""
