"""Compares whole models: sides in processes of their own, in interleaved rounds."""
