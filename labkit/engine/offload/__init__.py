"""Models larger than memory: layers that are read from a file when their turn comes."""
