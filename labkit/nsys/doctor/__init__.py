"""What keeps a machine from being profiled, and what repairs it."""
