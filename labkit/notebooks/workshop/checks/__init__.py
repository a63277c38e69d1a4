"""The checks of the workshop's exercises, one module for each."""
