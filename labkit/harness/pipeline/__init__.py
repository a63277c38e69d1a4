"""Schedules of a pipeline of stages: by formula, in the ideal, and as measured."""
