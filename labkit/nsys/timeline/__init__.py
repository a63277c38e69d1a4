"""A trace as lanes of events, in as much detail as a view can show, and as a file for other viewers."""
