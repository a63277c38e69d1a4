"""Notes on a layer that runs region by region: the wall time of each region, or its torch ops."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.harness.regions.vocabulary import REGIONS
from labkit.stages import Stage

Samples = dict[Stage, list[int]]  # nanoseconds of each call


class RegionClock:
    """Wall time of each call of each region; its `around` is an argument of `run_layer`."""

    def __init__(self) -> None:
        self.samples_ns: Samples = defaultdict(list)
        self._region = REGIONS[0]
        self._start = 0

    def around(self, region: Stage) -> RegionClock:
        self._region = region
        return self

    def __enter__(self) -> None:
        self._start = perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.samples_ns[self._region].append(perf_counter_ns() - self._start)


@dataclass
class Counted:
    """Torch ops that compute or copy. Views are left out."""

    ops: list[str] = field(default_factory=list)  # names
    bytes: int = 0  # that the ops read and write


class OpCounter(TorchDispatchMode):
    """Counts the torch ops of each region; its `around` is an argument of `run_layer`."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[Stage, Counted] = defaultdict(Counted)
        self._region = REGIONS[0]

    def around(self, region: Stage) -> AbstractContextManager[None]:
        self._region = region
        return nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = name == "_unsafe_view" or all(alias is not None and not alias.is_write for alias in aliases)
        if not is_view:
            tensors = [*_tensors(args), *_tensors(kwargs or {}), *_tensors(result)]
            counted = self.regions[self._region]
            counted.ops.append(name)
            counted.bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []
