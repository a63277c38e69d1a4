"""Studies: all measurements, captures and frames of a notebook in one call."""
