"""DeepSpeed's module path for its layers, for scripts that import them from there."""
