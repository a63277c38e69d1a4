"""Transformer layers under DeepSpeed's module names."""
