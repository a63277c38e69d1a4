"""How the words of a command line are read."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from typer.core import TyperCommand

from labkit.system.errors import UserError
from labkit.system.shown import shown

MOST = 1e9
BOUNDS = {  # of options by their names; what a model or a machine allows besides is said where it is known
    "threads": (1, max(256, 4 * (os.cpu_count() or 1))),
    "seed": (0, 2**32 - 2),  # NumPy's generators take no more, and prompts have the next one
    "temperature": (0, 1000),
    **dict.fromkeys(("rounds", "new", "prompt", "context", "tokens", "window", "stride", "rows"), (1, 10_000_000)),
    **dict.fromkeys(("tp", "pp", "ranks", "slots", "nth", "occurrence"), (1, 10_000)),
    **dict.fromkeys(("memory_gb", "resident_gb", "disk_gb_s", "gflops", "budget_s", "wait_quiet"), (0, MOST)),
    "tolerance": (0, MOST),
    "batch": (1, 65_536),
}


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
                    check_number(each, name)
        return left


def _present(word: str, own: Collection[str]) -> str:
    """A word with the present name of an option of the command that it calls by a former one."""
    name, equals, value = word.partition("=")
    present = FORMER.get(name.replace("_", "-"), "")
    return f"{present}{equals}{value}" if present in own and name not in own else word


def check_number(number: float, name: str) -> None:
    """UserError for a number beyond BOUNDS, and for NaN."""
    least, most = BOUNDS[name]
    if not least <= number <= most:
        expected = f"at least {least:g}" if number < least else f"at most {most:,}" if number > most else "a number"
        raise UserError(f"got {name} = {number:g}, expected {expected}")


def check_text(text: str, name: str) -> None:
    """UserError for words that held bytes which are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"got {name} = {shown(text)}, which is no UTF-8; expected text in UTF-8") from None
