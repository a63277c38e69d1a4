"""The sums that tensor-parallel ranks exchange, timed alone."""
