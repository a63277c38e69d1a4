"""Proof that a cut is right: runs all ranks of a block in threads, and compares their outputs with the block's."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from labkit.engine.parallel.slicing.linear import Reduce
from labkit.engine.parallel.slicing.plan import Unit
from labkit.engine.parallel.slicing.reading import Number, Reading, numbers_read
from labkit.engine.parallel.slicing.recording import FAILURES, Call, is_float, mapped, randomise, randomised, tensors
from labkit.engine.parallel.slicing.sliced import sliced_copy
from labkit.engine.parallel.slicing.trace import BlockTrace, trace

TOLERANCE = 1e-4  # of the largest value, in float32: a wrong cut is off by tenths of it, rounding by 1e-6
PATIENCE_S = 120.0  # longest wait of a rank for the others' sums


class ThreadedSum:
    """All-reduce over `ranks` threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self.partials: list[Tensor | None] = [None] * ranks

    def of_rank(self, rank: int) -> Reduce:
        def reduce(partial: Tensor) -> Tensor:
            self.partials[rank] = partial
            self.barrier.wait()
            total = torch.stack([part for part in self.partials if part is not None]).sum(0)
            self.barrier.wait()
            return total

        return reduce


@dataclass(frozen=True)
class ProvingBlock:
    """Whole block with random weights in float32, with its calls, outputs and trace.

    numbers: that the forward reads.
    """

    block: nn.Module
    calls: tuple[Call, ...]
    outputs: list[list[Tensor]]  # of each call
    trace: BlockTrace
    numbers: dict[Number, int]

    @classmethod
    def of(cls, block: nn.Module, calls: Sequence[Call]) -> "ProvingBlock":
        generator = torch.Generator().manual_seed(0)
        whole = sliced_copy(block, {}, 0, lambda partial: partial).eval()
        randomise(whole, generator)
        for module in whole.modules():
            module._buffers.update(
                {name: buffer.float() for name, buffer in module._buffers.items() if is_float(buffer)}
            )
        noisy = tuple(randomised(call, generator) for call in calls)
        with numbers_read(whole) as numbers:
            outputs = run(whole, noisy)
        return cls(whole, noisy, outputs, trace(whole, with_own_cache(noisy[0])), numbers)

    def reading(self, rows: Sequence[str], modules: Sequence[str]) -> Reading:
        """Reads what the inputs of row-parallel linears depend on, in the first call."""
        columns = [name for row in rows for name in self.trace.columns(row)]
        copy_ = sliced_copy(self.block, {}, 0, lambda partial: partial)  # modules may keep tensors of their last call
        return Reading.of(copy_, with_own_cache(self.calls[0]), columns, rows, modules)

    def objection(self, units: Sequence[Unit], ranks: int) -> str | None:
        """Returns the reason why cutting `units` is wrong; None: all ranks return the outputs of the whole block."""
        summed = ThreadedSum(ranks)
        outputs: list[list[list[Tensor]] | Exception] = [[] for _ in range(ranks)]

        def work(rank: int) -> None:
            try:
                outputs[rank] = run(sliced_copy(self.block, {"": units}, rank, summed.of_rank(rank)), self.calls)
            except threading.BrokenBarrierError as error:
                outputs[rank] = error
            except FAILURES as error:
                summed.barrier.abort()
                outputs[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [output for output in outputs if isinstance(output, Exception)]
        if failed:  # a broken barrier is the consequence of another rank's error
            first = min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
            return f"{type(first).__name__}: {first}".split("\n")[0]
        return self._difference([output for output in outputs if not isinstance(output, Exception)])

    def _difference(self, ranks: list[list[list[Tensor]]]) -> str | None:
        for step, expected in enumerate(self.outputs):
            for index, whole in enumerate(expected):
                parts = [rank[step][index] for rank in ranks]
                outputs = parts if parts[0].shape == whole.shape else [_by_heads(parts, whole)]
                for rank, part in enumerate(outputs):
                    if part is None or part.shape != whole.shape:
                        return f"output {index} has shape {list(parts[0].shape)}, expected {list(whole.shape)}"
                    if not (difference := _relative(part, whole)) <= TOLERANCE:
                        return f"rank {rank} differs by {difference:.1e} of the largest value in call {step + 1}"
        return None


def run(block: nn.Module, calls: Sequence[Call]) -> list[list[Tensor]]:
    """Returns the output tensors of each call. Later calls see the KV cache that the first call filled."""
    caches: list[Cache] = []

    def own(value: object) -> object:
        if not isinstance(value, Cache):
            return value
        if not caches:
            caches.append(copy.deepcopy(value))
        return caches[0]

    with torch.no_grad():
        return [list(tensors(block(*mapped(own, call.args), **mapped(own, call.kwargs)))) for call in calls]


def with_own_cache(call: Call) -> Call:
    def own(value: object) -> object:
        return copy.deepcopy(value) if isinstance(value, Cache) else value

    return Call(mapped(own, call.args), mapped(own, call.kwargs))


def _by_heads(parts: list[Tensor], whole: Tensor) -> Tensor | None:
    """Returns the ranks' heads joined along their axis, as in attention weights and position biases; None: the shapes
    do not fit.
    """
    axes = [axis for axis, (part, all_) in enumerate(zip(parts[0].shape, whole.shape, strict=False)) if part != all_]
    same = len(axes) == 1 and all(part.ndim == whole.ndim for part in parts)
    return torch.cat(parts, axes[0]) if same else None


def _relative(output: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, as a share of the largest expected value."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(output, expected) else float("inf")
    # masks contain the smallest number, which would hide all other differences
    masked = torch.finfo(expected.dtype).min / 2
    kept = expected > masked
    if not torch.equal(kept, output > masked):
        return float("inf")
    largest = expected[kept].abs().max().clamp(min=1e-6)
    return float((output[kept] - expected[kept]).abs().max() / largest)
