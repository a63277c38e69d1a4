"""Rows of architectures that have none written by hand, read from a small model of the same class."""
