"""Readers of profilers' files: nsys exports and Chrome traces become a Trace."""
