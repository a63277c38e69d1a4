"""What the Triton kernels know of records that have other implementations, too. They refuse everything else by name.

A new field of such a record has a default that stands for its absence. The kernels refuse other values, until the field
is listed here.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from labkit.system.errors import UnsupportedError

KNOWN_FIELDS = {
    "ExpertsSpec": frozenset({"count", "chosen", "renormalised", "shared", "shared_gate", "held"}),
    "Router": frozenset({"norm", "matrix", "chosen", "renormalised", "addend_norm"}),
    "MixtureMlp": frozenset({"router", "own", "ups", "outs", "activation", "gated", "hidden", "out_norm", "shared"}),
    "SharedExpert": frozenset({"region", "out", "gate"}),
    "ExpertMlps": frozenset({"regions", "outs"}),
    "MlpWeights": frozenset({"norm", "up", "activation", "gated", "addend_norm"}),
}
KNOWN_ACTIVATIONS = frozenset({"gelu", "gelu_tanh", "relu", "silu", "relu_squared"})

SHOWN = (bool, int, float, str)


def unknown_to_triton(record: Any) -> str | None:
    """The first field of a record whose value the kernels do not know, such as "Router.scale = 2.5"; None: none."""
    kind = type(record).__name__
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name not in KNOWN_FIELDS[kind]:
            if not isinstance(value, SHOWN) and value is not field.default:
                return f"{kind}.{field.name}"
            if field.default is MISSING or value != field.default:
                return f"{kind}.{field.name} = {value!r}"
        elif field.name == "activation" and value not in KNOWN_ACTIVATIONS:
            return f"{kind}.activation = {value!r}"
    return None


def require_known(*records: Any) -> None:
    """Raises UnsupportedError for a record with a field that the kernels do not know."""
    for record in records:
        if unknown := unknown_to_triton(record):
            raise UnsupportedError(f"got {unknown}, which is not in the Triton kernels yet; use impl='cpp'")
