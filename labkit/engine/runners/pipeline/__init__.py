"""Pipeline: stages of a model that work on different micro-batches at a time, and the schedules of their steps."""
