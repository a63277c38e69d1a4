"""The fused regions of a layer against the unfused ops, on the same numbers."""
