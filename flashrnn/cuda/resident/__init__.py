"""Backend `cuda_fused`: R stays on the chip, in the registers and shared memory of a block, a cluster or a grid."""
