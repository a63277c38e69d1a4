"""Options of DeepSpeed that change nothing in labkit. They are checked and left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, create_model

from labkit.system.errors import UnsupportedError
from labkit.system.validation import Strict

log = logging.getLogger("labkit")
AtLeastOne = Annotated[int, Field(ge=1)]


class IgnoredOption(NamedTuple):
    """An option without effect."""

    type: Any
    default: Any
    why: str
    required: bool = False  # another value than the default is not supported


IGNORED = {
    "max_out_tokens": IgnoredOption(AtLeastOne, 1024, "the KV cache grows as needed"),
    "min_out_tokens": IgnoredOption(AtLeastOne, 1, "the KV cache grows as needed"),
    "replace_method": IgnoredOption(str | None, None, "the engine always runs on its kernels"),
    "replace_with_kernel_inject": IgnoredOption(bool, False, "the engine always runs on its kernels"),
    "return_tuple": IgnoredOption(bool, True, "outputs are transformers' own"),
    "set_empty_params": IgnoredOption(bool, False, "weights are packed while they are read", required=True),
    "training_mp_size": IgnoredOption(int, 1, "checkpoints say how they were divided"),
    "transposed_mode": IgnoredOption(bool, False, "the policy says how matrices are stored"),
    "triangular_masking": IgnoredOption(bool, True, "the config says what a token sees", required=True),
    "triton_autotune": IgnoredOption(bool, False, "tiles are chosen with `labkit tune`", required=True),
}
_Values: Any = create_model(
    "_Values",
    __base__=Strict,
    **{name: (row.type, row.default) for name, row in IGNORED.items()},  # type: ignore[call-overload]
)


def without_ignored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without the ignored ones. Raises ValidationError for a value of the wrong type, and
    UnsupportedError for a value that would have to change something.
    """
    values: Any = _Values(**{name: value for name, value in options.items() if name in IGNORED})
    for name in values.model_fields_set:
        row, value = IGNORED[name], getattr(values, name)
        if row.required and value != row.default:
            raise UnsupportedError(f"{name}={value!r} is not supported yet; leave it at {row.default!r}")
        log.info("labkit: the option %s has no effect: %s", name, row.why)
    return {name: value for name, value in options.items() if name not in IGNORED}
