"""Judges code that is not trusted: whether it computes the right result, and how fast."""
