"""A trace as lanes of events, with the detail that a view can show, and as a file for other viewers."""
