"""The forms of tables. Does not import pandas: the command line begins here."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from labkit.system.errors import UserError
from labkit.system.whole_file import check_no_input, check_output_file


class Form(StrEnum):
    TERMINAL = "terminal"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    PARQUET = "parquet"

    @classmethod
    def of(cls, *, output: Path | None, inputs: Iterable[Path], **options: bool) -> Form:
        """The form that the options select. UserError for two forms, for a form that needs a file without one, and for
        an output file that is one of the inputs, or that cannot be written.
        """
        names = [name for name, on in options.items() if on]
        if len(names) > 1:
            raise UserError(f"got {' and '.join(f'--{name}' for name in names)}; give one of them")
        form = cls(names[0]) if names else cls.TERMINAL
        if form is cls.PARQUET and output is None:
            raise UserError("got --parquet without --output; a binary file needs a name: add --output NAME.parquet")
        if form is cls.TERMINAL and output is not None:
            raise UserError(f"got --output {output} without a form; add --json, --csv, --markdown or --parquet")
        if output is not None:
            check_no_capture(output, inputs)
            if not (form is cls.PARQUET and output.is_dir()):  # several tables are files in a folder
                check_output_file(output)
        return form


def check_no_capture(output: Path, captures: Iterable[Path]) -> None:
    """Raises UserError if the output is one of the captures, or the record next to one: it would be replaced."""
    from labkit.nsys.capture.record import record_file_beside

    for capture in captures:
        check_no_input(output, [capture])
        if (beside := record_file_beside(capture)) is not None:
            check_no_input(output, [beside[0]], kind=f"the record of {capture},")
