"""Schedules of a pipeline of stages: formulas, ideal runs and measurements."""
