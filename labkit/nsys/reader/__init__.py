"""Files of profilers: nsys exports and Chrome traces, read into a Trace."""
