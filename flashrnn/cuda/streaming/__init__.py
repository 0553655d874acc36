"""Backend `cuda`: R of any size, read from the second-level cache or from memory at every step."""
