"""How the words of a command line are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from typer.core import TyperCommand

from labkit.system.bounds import BOUNDS, check_number
from labkit.system.errors import UserError
from labkit.system.shown import shown

FORMER = {  # names that options had, or have as parameters of notebooks; no help shows them
    "--precision": "--dtype",
    "--precisions": "--dtype",
    "--cycles": "--rounds",
    "--new-tokens": "--new",
    "--prompt-tokens": "--prompt",
}


class Command(TyperCommand):
    """A command whose numbers are within BOUNDS, and whose texts are UTF-8. Names of files may be any bytes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in parameter.opts}
        at = args.index("--") if "--" in args else len(args)  # another program's words follow
        left = super().parse_args(ctx, [*(_present(word, own) for word in args[:at]), *args[at:]])
        for name, value in ctx.params.items():
            if name == "command":  # of another program
                continue
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, str):
                    check_text(each, name)
                elif isinstance(each, int | float) and name in BOUNDS:
                    check_number(name, each)
        return left


def _present(word: str, own: Collection[str]) -> str:
    """A word with the present name of an option of the command that it calls by a former one."""
    name, equals, value = word.partition("=")
    present = FORMER.get(name.replace("_", "-"), "")
    return f"{present}{equals}{value}" if present in own and name not in own else word


def check_text(text: str, name: str) -> None:
    """UserError for words that held bytes which are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"got {name} = {shown(text)}, which is no UTF-8; expected text in UTF-8") from None
