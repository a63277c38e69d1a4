"""What the modules of a model compute, seen in a run on a few tokens."""
