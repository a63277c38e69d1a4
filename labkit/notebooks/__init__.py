"""Notebooks as commands: typed parameters in, an executed notebook and one self-contained HTML report out."""

from labkit.notebooks.execution import RunReport, run_notebook
from labkit.notebooks.failure import Failure
from labkit.notebooks.parameters import NotebookError, Parameter, ParameterError, checked_values, read_parameters

__all__ = [
    "Failure",
    "NotebookError",
    "Parameter",
    "ParameterError",
    "RunReport",
    "checked_values",
    "read_parameters",
    "run_notebook",
]
