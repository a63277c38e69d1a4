"""Exercises that learners solve on their own machine, and their checks."""
