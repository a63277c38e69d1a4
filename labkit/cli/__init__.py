"""The `labkit` command."""
