"""Checkpoints of models that several ranks share: those that DeepSpeed describes, and those that labkit saves.

`pieces` finds the parts of a tensor that is divided among files. `described` reads DeepSpeed's descriptions, with
`megatron` and `tensor_parallel`. `save` writes the weights as an engine holds them, packed for its kernels, and `saved`
reads them again for any number of ranks.
"""
