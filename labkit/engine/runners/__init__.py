"""Runners of a step: one C++ call, one op after another, a CUDA graph, or a pipeline of ranks."""
