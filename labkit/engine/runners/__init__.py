"""Runners of a step: one C++ call, one op after another, or a CUDA graph."""
