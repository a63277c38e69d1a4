"""Names of precisions of weights, such as "bfloat16" and "int4-32+head", for commands, notebooks and comparisons."""

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
GROUPS = {8: "row", 4: "32"}  # defaults by bits: how many inputs share a scale
TYPES = {8: "symmetric", 4: "asymmetric"}  # defaults by bits
IN_GROUPS = tuple(f"int4-{size}" for size in GROUP_SIZES)
EXAMPLES = (*FLOAT_DTYPES, "int8", "int8-32", "int4", *IN_GROUPS, "int4-32+head", STORED)
KNOWN = (
    f"{', '.join(FLOAT_DTYPES)}, int8, int4, either with groups ({', '.join(IN_GROUPS)}, int8-row), with "
    f"-symmetric or -asymmetric, the LM head (+head, or +head8 for 8 bits) and rounded activations (+a8), or {STORED}"
)


@dataclass(frozen=True)
class Precision:
    """How the weights of a model are stored. `options`: the options of `init_inference` for this precision.

    With int8 and int4, the matrices of the layers are integers of 8 or 4 bits. If a name says no groups, int8 has one
    symmetric scale per row, and int4 has asymmetric groups of 32 inputs. "+head" stores the LM head in the same way
    and "+head8" with 8 bits in groups of 32; otherwise the head stays in floating point. "+a8" lets kernels round
    activations to 8 bits. "stored" keeps the file's own precision: the codes of a GGUF file, or the type of a
    checkpoint.
    """

    name: str
    dtype: torch.dtype | None
    quant: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": self.dtype} | ({"quant": self.quant} if self.quant else {})


def precision_of(name: str) -> Precision:
    """The precision of this name. Raises UserError for an unknown name."""
    if name == STORED or name in FLOAT_DTYPES:
        return Precision(name, FLOAT_DTYPES.get(name))
    if (match := INTEGERS.fullmatch(name)) is None:
        raise UserError(f"unknown precision {name!r}{did_you_mean(name, EXAMPLES)}; expected one of {KNOWN}")
    bits = int(match["bits"])
    group, q_type = match["group"] or GROUPS[bits], match["q_type"] or TYPES[bits]
    if group != "row" and int(group) not in GROUP_SIZES:
        raise UserError(
            f"got groups of {group} inputs in {name!r}; expected one of {', '.join(map(str, GROUP_SIZES))}, or row"
        )
    quant: dict[str, Any] = {"weight": {"num_bits": bits, "q_type": q_type}}
    if group != "row":
        quant["weight"]["group_size"] = int(group)
    if match["head"]:
        quant["lm_head"] = {"num_bits": 8, "group_size": 32} if match["head"] == "+head8" else True
    if match["rounded"]:
        quant["activation"] = {"enabled": True}
    return Precision(name, torch.int8, quant)
