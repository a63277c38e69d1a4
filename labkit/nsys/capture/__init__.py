"""Captures: commands run under a profiler, and their reports verified, scrubbed and recorded."""
