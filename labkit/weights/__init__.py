"""Sources of weights, checkpoints, quantisation, and the weight records that kernels read."""
