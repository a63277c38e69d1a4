"""The parts of a layer by its structure, for models of which no row says more: what mixes tokens, and the MLP."""

from __future__ import annotations

from itertools import takewhile

from torch import Tensor, nn

from labkit.stages import Stage

Boundary = tuple[str, Stage | None, Stage | None]  # a module of a layer, and the stages that begin before and after it


def layers_of(model: nn.Module) -> str | None:
    """The path of the list of layers: of all lists of modules the one with the most matrices; None: it has no list."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    counts = {path: sum(map(_is_matrix, module.modules())) for path, module in lists.items()}
    outer = [path for path in counts if counts[path] and not any(path.startswith(f"{other}.") for other in counts)]
    return max(outer, key=counts.__getitem__, default=None)


def boundaries_of(layer: nn.Module) -> list[Boundary]:
    """The boundaries of a layer's stages: its last part, or the linears at its end, are the MLP, and all before them
    mixes tokens. A layer of one part only mixes tokens. Norms belong to the part after them.
    """
    parts = _parts(layer, "")
    linears = [name for name, _ in takewhile(lambda part: _is_matrix(part[1]), reversed(parts))]
    before = parts[: -max(1, len(linears))]
    if not before:
        return [("", Stage.ATTENTION, None)]
    return [("", Stage.ATTENTION, None), (before[-1][0], None, Stage.MLP), (parts[-1][0], None, Stage.RESIDUAL)]


def _parts(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The children with matrices, in their order. A child that is a list is taken apart."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            parts += _parts(child, f"{prefix}{name}.")
        elif any(map(_is_matrix, child.modules())):
            parts.append((f"{prefix}{name}", child))
    return parts


def _is_matrix(module: nn.Module) -> bool:
    """Whether a module has a matrix of its own, packed or not."""
    weight = getattr(module, "weight", None)
    of_parameters = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return of_parameters or (isinstance(weight, Tensor) and weight.dim() > 1)
