"""In which form tables are shown, and what people see of each. Loads no pandas: the command line begins here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.system.errors import UserError
from labkit.system.whole_file import check_no_input

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Shown:
    """What people see of a table: its columns, its title, and in which columns names of kernels are shortened. Or,
    instead of the columns, one sentence for each row, which the function `sentence` of the module `sentences` says.
    `of_ranks`: it says what a rank did, so its rank is shown even where it is the only one.
    """

    columns: tuple[str, ...]
    title: str
    kernels: tuple[str, ...] = ()
    sentences: str = ""
    of_ranks: bool = False

    def lines(self, frame: pd.DataFrame) -> list[str]:
        say = import_module(self.sentences).sentence
        return [f"{number}. {say(row)}" for number, row in enumerate(frame.to_dict("records"), 1)]


class Form(StrEnum):
    TERMINAL = "terminal"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    PARQUET = "parquet"

    @classmethod
    def of(cls, *, output: Path | None, inputs: Iterable[Path], **wanted: bool) -> Form:
        """The one form that is wanted. UserError for two, for a form that needs a file without one, and for a file that
        is one of the inputs.
        """
        asked = [name for name, on in wanted.items() if on]
        if len(asked) > 1:
            raise UserError(f"got {' and '.join(f'--{name}' for name in asked)}; give one of them")
        form = cls(asked[0]) if asked else cls.TERMINAL
        if form is cls.PARQUET and output is None:
            raise UserError("got --parquet without --output; a file of bytes needs a name: add --output NAME.parquet")
        if form is cls.TERMINAL and output is not None:
            raise UserError(f"got --output {output} without a form; add --json, --csv, --markdown or --parquet")
        if output is not None:
            check_no_input(output, inputs)
        return form
