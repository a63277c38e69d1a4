"""A trace as lanes of events, in as much detail as a view can show."""
