"""Starts the ranks of a model: with torchrun from a shell, or with a function call from a notebook."""
