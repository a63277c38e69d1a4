"""Checkpoints that are divided among ranks: DeepSpeed's, and labkit's own.

`pieces` finds the parts of a tensor that is divided among files. `described` reads DeepSpeed's descriptions, with
`megatron` and `tensor_parallel`. `save` writes an engine's weights, packed for its kernels, and `saved` reads them for
any number of ranks.
"""
