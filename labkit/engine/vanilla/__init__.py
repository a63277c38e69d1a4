"""Transformers' own models for comparisons: annotated with the stages, and replayed as a CUDA graph."""
