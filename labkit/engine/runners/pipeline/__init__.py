"""Stages of a model that work on different parts of a batch at a time: who begins what when, and who does what."""
