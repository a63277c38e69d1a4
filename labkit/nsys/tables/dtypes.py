"""The types of numbers, by their names in traces."""

from __future__ import annotations

import re

BYTES = {
    **dict.fromkeys(("double", "int64", "long", "longint", "complexfloat", "float64", "unsignedlong"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32", "tf32"), 4),
    **dict.fromkeys(("half", "bfloat16", "float16", "short", "int16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsignedchar", "signedchar"), 1),
    "complexdouble": 16,
}
PREFIX = re.compile(r"^c10::|^at::|^torch\.|\s|^std::")


def element_bytes(dtype: str) -> int:
    """Bytes of a number of a type such as "Half", "c10::BFloat16" or "long int"; 0 for an unknown type."""
    name = PREFIX.sub("", dtype.replace(" ", "")).lower().removesuffix("_")
    if name.startswith("float8") or name.startswith(("fp8", "e4m3", "e5m2")):
        return 1
    return BYTES.get(name, 0)
