"""Checkpoints of models that several ranks share: those that DeepSpeed describes, and labkit's own, packed as they run.

`pieces` says where each part of a divided tensor is, whatever divided it. `described` reads DeepSpeed's descriptions
(`megatron`, `tensor_parallel`), `save` writes what an engine holds and `saved` reads it for any number of ranks.
"""
