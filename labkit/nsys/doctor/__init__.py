"""The doctor: problems that keep a machine from being profiled, and their repairs."""
