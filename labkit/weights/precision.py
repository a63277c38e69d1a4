"""Names for how weights are stored, as commands, notebooks and comparisons take them: "bfloat16", "int4-32+head"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.weights.quantise import GROUP_SIZES

STORED = "stored"
INTEGERS = re.compile(
    r"int(?P<bits>[48])(?:-(?P<group>row|\d+))?(?:-(?P<q_type>symmetric|asymmetric))?(?P<head>\+head8?)?(?P<rounded>\+a8)?"
)
GROUPS = {8: "row", 4: "32"}  # where a name does not say how many inputs share a scale
TYPES = {8: "symmetric", 4: "asymmetric"}  # where it does not say which kind
EXAMPLES = (*FLOAT_DTYPES, "int8", "int8-32", "int4", "int4-32", "int4-64", "int4-128", "int4-32+head", STORED)
KNOWN = (
    f"{', '.join(FLOAT_DTYPES)}, int8, int4, either with groups (int4-32, int4-64, int4-128, int8-row), with "
    f"-symmetric or -asymmetric, the LM head (+head, or +head8 for 8 bits) and rounded activations (+a8), or {STORED}"
)


@dataclass(frozen=True)
class Precision:
    """How the weights of a model are stored: `options` are those of `init_inference` that ask for it.

    Of integers: the matrices of the layers, of 8 or 4 bits. Without groups int8 has one for each row, symmetric, and
    int4 has groups of 32 inputs, asymmetric. "+head" stores the LM head in the same way and "+head8" with 8 bits in
    groups of 32; otherwise it stays in floating point. "+a8" lets kernels round activations to 8 bits. "stored" is how
    the file has them: the codes of a GGUF file, or the type of a checkpoint.
    """

    name: str
    dtype: torch.dtype | None
    quant: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": self.dtype} | ({"quant": self.quant} if self.quant else {})


def precision_of(name: str) -> Precision:
    """The precision of this name. UserError for an unknown one."""
    if name == STORED or name in FLOAT_DTYPES:
        return Precision(name, FLOAT_DTYPES.get(name))
    if (found := INTEGERS.fullmatch(name)) is None:
        raise UserError(f"unknown precision {name!r}{did_you_mean(name, EXAMPLES)}; expected one of {KNOWN}")
    bits = int(found["bits"])
    group, q_type = found["group"] or GROUPS[bits], found["q_type"] or TYPES[bits]
    if group != "row" and int(group) not in GROUP_SIZES:
        raise UserError(
            f"got groups of {group} inputs in {name!r}; expected one of {', '.join(map(str, GROUP_SIZES))}, or row"
        )
    quant: dict[str, Any] = {"weight": {"num_bits": bits, "q_type": q_type}}
    if group != "row":
        quant["weight"]["group_size"] = int(group)
    if found["head"]:
        quant["lm_head"] = {"num_bits": 8, "group_size": 32} if found["head"] == "+head8" else True
    if found["rounded"]:
        quant["activation"] = {"enabled": True}
    return Precision(name, torch.int8, quant)
