"""Times the sums that tensor-parallel ranks exchange, without a model."""
