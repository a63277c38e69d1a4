"""Runs notebooks as commands: from typed parameters to an executed notebook and a self-contained HTML report."""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
    from labkit.notebooks.execution import RunReport, run_notebook
    from labkit.notebooks.failure import Failure, NotebookError
    from labkit.notebooks.parameters import Parameter, ParameterError, checked_values, read_parameters

__all__, __getattr__, __dir__ = lazy_parts(__name__)
