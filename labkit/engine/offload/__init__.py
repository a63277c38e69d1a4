"""Offloading of layers, and of keys and values, for models and caches that are larger than memory."""
