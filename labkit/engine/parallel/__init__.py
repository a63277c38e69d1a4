"""Models over several processes: what a rank holds, and what the ranks do together."""
