"""Models over several processes: the parts of the ranks, and their exchanges."""
