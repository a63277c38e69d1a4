"""Turns of a few tokens, and epochs with weights in new memory."""
