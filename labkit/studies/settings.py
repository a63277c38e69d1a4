"""The settings of a study. The study's signature declares each of them once, with type, default, help and bounds.

A notebook's parameters, its controls and the checks of values follow from the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Annotated, Any, get_args, get_type_hints

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.models.presets import PRESETS
from labkit.system.errors import UserError, UserTypeError
from labkit.system.typed_value import refusal, typed

CHOSEN = {"threads": "chosen for this machine", "rounds": "until there is a verdict"}  # what 0 stands for
LEFT_OUT = {"sample": "greedy search", "path": "a temporary folder"}  # what an empty text stands for


@dataclass(frozen=True)
class StudySetting:
    """A setting of a study, as the metadata of an annotated parameter: `batch: Annotated[int, StudySetting(…)] = 1`.

    `settings_of` adds the name, the type and the default.
    """

    help: str  # one line
    bounds: tuple[float, float] = (float("-inf"), float("inf"))  # of a number
    choices: tuple[str, ...] = ()  # all values that the control offers
    suggestions: tuple[str, ...] = ()  # values that the control completes; any text is possible
    check: Callable[[str], object] | None = None  # raises UserError for an invalid text
    name: str = ""
    kind: type = str
    default: Any = None

    def value(self, given: object) -> Any:
        """A value in the setting's type. UserError if it has another type, is out of bounds or fails the check."""
        try:
            value = typed(given, self.kind)
        except TypeError:
            raise UserTypeError(refusal(self.name, given, self.kind.__name__)) from None
        least, most = self.bounds
        if self.kind is not str and not least <= value <= most:
            raise UserError(refusal(self.name, value, f"{least:g} to {most:.15g}"))
        if self.check is not None:
            self.check(value)
        return value


def settings_of(study: Callable[..., Any]) -> dict[str, StudySetting]:
    """The settings in the signature of a study, by name and in their order."""
    hints, parameters = get_type_hints(study, include_extras=True), signature(study).parameters
    settings = {}
    for name, parameter in parameters.items():
        kind, *extras = get_args(hints[name]) or (None,)
        for extra in extras:
            if isinstance(extra, StudySetting):
                settings[name] = replace(extra, name=name, kind=kind, default=parameter.default)
    return settings


def setting_words(name: str, value: object) -> str:
    """The value of a setting or a parameter in words: "0 threads" would be misleading."""
    if value == "":
        return LEFT_OUT.get(name, "none")
    return CHOSEN.get(name, str(value)) if value == 0 else str(value)


Model = Annotated[
    str,
    StudySetting(
        "a preset (see `labkit models`), a checkpoint folder, a GGUF file or a hub id", suggestions=tuple(PRESETS)
    ),
]
FloatDtype = Annotated[
    str, StudySetting("of weights and activations: float32, bfloat16 or float16", choices=tuple(FLOAT_DTYPES))
]
Batch = Annotated[int, StudySetting("sequences in a batch", (1, 256))]
PromptTokens = Annotated[int, StudySetting("tokens of each prompt", (1, 4096))]
NewTokens = Annotated[int, StudySetting("tokens to generate, at least 2", (2, 4096))]
Rounds = Annotated[int, StudySetting("runs of each side, interleaved; 6 or more for a 95 % interval", (2, 99))]
Epochs = Annotated[int, StudySetting("epochs of turns; 0: until there is a verdict, a minute at most", (0, 99))]
Threads = Annotated[int, StudySetting("CPU threads; 0: as many as the engine takes", (0, 256))]
RankThreads = Annotated[int, StudySetting("CPU threads of each rank; 0: an equal share of the cores", (0, 256))]
Question = Annotated[str, StudySetting("each side answers it once, if the model holds conversations")]
