"""Sources of the matrices to cut: the user's injection policy, transformers' plan, or the flow of data in a block."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from labkit.engine.parallel.slicing.linear import is_linear
from labkit.engine.parallel.slicing.plan import Role, RoleSource, Unit
from labkit.engine.parallel.slicing.sliced import child
from labkit.engine.parallel.slicing.trace import BlockTrace
from labkit.system.errors import UserError

InjectionPolicy = Mapping[Any, str | tuple[str, ...] | list[str]]
Blocks = dict[str, tuple[nn.Module, tuple[str, ...] | None]]  # block by name, with the ends of its row linears' names


def listed_blocks(model: nn.Module) -> Blocks:
    """Returns the members of the outermost module lists."""
    blocks: Blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in blocks):
            for place, block in module.named_children():
                if any(is_linear(part) for part in block.modules()):
                    blocks[f"{name}.{place}" if name else place] = (block, None)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no list of layers; name its layer class and row-parallel linears in "
            "injection_policy={LayerClass: ('attention.output', 'mlp.output')}"
        )
    return blocks


def policy_blocks(model: nn.Module, policy: InjectionPolicy) -> Blocks:
    """Returns the blocks that a policy names. Raises UserError for names that the model doesn't have."""
    chosen: Blocks = {}
    for layer_class, row_names in policy.items():
        ends = (row_names,) if isinstance(row_names, str) else tuple(row_names)
        blocks = {name: module for name, module in model.named_modules() if _is_a(module, layer_class)}
        class_name = layer_class if isinstance(layer_class, str) else layer_class.__name__
        if not blocks:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise UserError(
                f"injection_policy names {class_name}, but {type(model).__name__} has no such block; "
                f"{_near(class_name, classes)}"
            )
        linears = sorted({name for block in blocks.values() for name in linears_of(block)})
        for end in ends:
            if not any(name.endswith(end) for name in linears):
                raise UserError(
                    f"injection_policy: no linear of {class_name} has a name that ends with {end!r}; "
                    f"{_near(end, linears)}"
                )
        chosen |= {name: (block, ends) for name, block in blocks.items()}
    return chosen


def _is_a(module: nn.Module, layer_class: Any) -> bool:
    if isinstance(layer_class, str):
        return type(module).__name__ == layer_class
    return isinstance(module, layer_class)


def _near(end: str, names: list[str]) -> str:
    """Returns a hint with close matches, among ends of names with the same number of parts, and with all names."""
    tails = sorted({".".join(name.split(".")[-end.count(".") - 1 :]) for name in names})
    near = difflib.get_close_matches(end, tails, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}It has {', '.join(names)}"


def linears_of(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if is_linear(module)]


def check_policy(layer_class: str, trace: BlockTrace, ends: tuple[str, ...]) -> None:
    """Raises UserError for a policy that contradicts the flow of data."""
    rows = trace.row_candidates
    for name, sources in trace.inputs.items():
        named = name.endswith(ends)
        if named and name not in rows:
            raise UserError(
                f"injection_policy makes {name} of {layer_class} row-parallel, but its input does not come from "
                f"other linears of the layer alone; linears that fit: {', '.join(rows) or 'none'}"
            )
        if not named and name in rows:
            fed_by = ", ".join(trace.columns(name)) or ", ".join(sorted(sources))
            raise UserError(
                f"injection_policy leaves out {name} of {layer_class}: {fed_by} would be column-parallel and feed "
                f"it only a share of its input; add {name!r}"
            )


@dataclass(frozen=True)
class TransformersPlan:
    """Roles in transformers' plan of a model. transformers has merged the plans of its config and of its parts.

    styles: by names with * for numbers.
    """

    styles: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "TransformersPlan":
        return cls(getattr(model, "tp_plan", None) or {})

    def style(self, name: str) -> str:
        return self.styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")

    def role(self, name: str) -> Role | None:
        """Returns the role of a linear or parameter by its name in the model. None: it isn't cut."""
        style = self.style(name)
        return Role.COLUMN if "colwise" in style else Role.ROW if "rowwise" in style else None

    def with_sources(self, unit: Unit, block: str) -> Unit:
        """Returns the unit with its sources: the plan names all, some or none of its matrices with the unit's roles."""
        roles = {linear.name: linear.role for linear in unit.linears} or {
            tensor.name: Role.COLUMN if tensor.axis == 1 else Role.ROW for tensor in unit.tensors
        }
        agree = [self.role(child(block, name)) == role for name, role in roles.items()]
        sources = [RoleSource.TRANSFORMERS] * any(agree) + [RoleSource.FLOW] * (not all(agree))
        return replace(unit, sources=tuple(sources))

    def contradictions(self, block: str, trace: BlockTrace) -> list[str]:
        """Returns the roles that are not followed, with reasons."""
        rows = trace.row_candidates
        columns = {column for row in rows for column in trace.columns(row)}
        reasons = []
        for name in trace.inputs:
            role, why = self.role(child(block, name)), ""
            if re.search("gather|split", self.style(child(block, name))):
                continue  # gathered at once, which fits every flow
            if role == Role.ROW and name not in rows:
                why = "its input does not come from other linears of the layer alone"
            elif role == Role.COLUMN and name in rows:
                why = f"its input comes from {', '.join(trace.columns(name))}, and its output joins the residual stream"
            elif role == Role.COLUMN and name not in columns:
                why = "no row-parallel linear reads its output"
            if why:
                reasons.append(f"transformers' plan makes {name} {role}-parallel, which is not followed: {why}")
        return reasons
