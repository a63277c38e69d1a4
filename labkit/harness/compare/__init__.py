"""Whole models against each other: sides in processes of their own, in interleaved rounds."""
