"""Checks of the words of a command line."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from labkit.system.asked_from import command_has
from labkit.system.bounds import BOUNDS, check_number
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.shown import shown

FORMER = {  # former names of options, and names of notebook parameters; help texts do not show them
    "--precision": "--dtype",
    "--precisions": "--dtype",
    "--cycles": "--rounds",
    "--new-tokens": "--new",
    "--prompt-tokens": "--prompt",
}


class Command(TyperCommand):
    """A command that checks that its numbers are within BOUNDS and its texts are UTF-8. File names may be any bytes,
    and may begin with `~`: shells leave the `~` of `--output=~/x` and of quoted words as it is.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in parameter.opts}
        command_has(own)
        end = args.index("--") if "--" in args else len(args)  # another program's words follow
        rest = super().parse_args(ctx, [*(_present(word, own) for word in args[:end]), *args[end:]])
        for name, value in ctx.params.items():
            if name == "command":  # of another program
                continue
            if isinstance(value, Path):
                ctx.params[name] = expanded(value)
            elif isinstance(value, list | tuple) and all(isinstance(item, Path) for item in value):
                ctx.params[name] = type(value)(map(expanded, value))
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, str):
                    check_text(item, name)
                elif isinstance(item, int | float) and name in BOUNDS:
                    check_number(name, item)
        return rest


def _present(word: str, own: Collection[str]) -> str:
    """The word with the present name of an option instead of a former name."""
    name, equals, value = word.partition("=")
    present = FORMER.get(name.replace("_", "-"), "")
    return f"{present}{equals}{value}" if present in own and name not in own else word


def check_text(text: str, name: str) -> None:
    """Raises UserError for a text from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"got {name} = {shown(text)}, which is not UTF-8; expected text in UTF-8") from None
