"""Where weights come from and how they are kept: sources, checkpoints, quantisation, records that kernels read."""
