"""Taking captures: commands under a profiler, verified, scrubbed and recorded."""
