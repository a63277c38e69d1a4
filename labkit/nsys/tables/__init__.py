"""Tables of any trace, annotated or not, as `labkit trace` shows them: frames with units in their column names."""
