"""Compares the fused regions of a layer with the unfused ops, on the same numbers."""
