"""Transformers' own models as comparisons need them: annotated with the stages, and played as a CUDA graph."""
