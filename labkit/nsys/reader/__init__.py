"""Files of profilers: reading nsys exports and Chrome traces into a Trace, and writing the latter."""
