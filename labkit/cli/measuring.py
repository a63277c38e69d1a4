"""Options that several commands share, and the class that parses the command lines of measuring commands."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.words import Command
from labkit.system.asked_from import offered, setting
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS

WAIT_S = 300.0


def output_option(help: str, file: str = "") -> Any:
    """The option `--output`: by default `runs`, or `file` in it, looked up when the command runs."""
    shown = Path(str(RUNS), file).as_posix()
    return typer.Option(help=help, default_factory=lambda: Path(RUNS, file), show_default=shown)


Model = Annotated[
    str, typer.Argument(help="A preset (see `labkit models`), a checkpoint folder, a GGUF file, or a hub id.")
]
OrTrained = Annotated[
    str | None,
    typer.Argument(help="A preset, a checkpoint folder, a GGUF file, or a hub id. Default: the trained smollm2-135m."),
]
PRECISIONS = "float32, bfloat16, float16, int8, int4-32, int4-64+head, stored, …"
Precision = Annotated[str, typer.Option(help=PRECISIONS)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
MemoryGb = Annotated[
    float | None, typer.Option(help="GB of memory for each side, without its imports; by default no limit.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default one per core.")]
Output = Annotated[Path, output_option("Folder for the results, as JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Width = Annotated[
    str | None, typer.Option(help="Go on until the interval is this narrow, such as 2%, or the budget is spent.")
]
WaitQuiet = Annotated[
    float | None,
    typer.Option(
        "--wait-quiet",
        metavar="[SECONDS]",
        help="Wait until other programs leave the processors idle, 300 seconds at most if no number follows.",
    ),
]


def fraction(name: str, text: str | None) -> float | None:
    """The fraction of an option that is "2%" or "0.02"; None without the option. UserError for any other text."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    try:
        return float(number) / (1 if number == text.strip() else 100)
    except ValueError:
        of_weights = f"; the data type of the weights is {setting('dtype')}" * (offered("dtype") != ())
        raise UserError(f"got {name} = {text!r}, expected a part, such as 2% or 0.02{of_weights}") from None


class MeasuringCommand(Command):
    """A command whose `--wait-quiet` may omit its number of seconds, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_seconds(args))


def _with_seconds(arguments: list[str]) -> list[str]:
    """The arguments with a number after every `--wait-quiet`."""
    complete = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        complete.append(argument)
        if argument == "--wait-quiet" and not _is_number(following):
            complete.append(str(WAIT_S))
    return complete


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
