"""Compares the records of two times, case by case."""
