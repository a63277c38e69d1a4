"""Keys and values that pass from host memory through slots on a GPU and back: each computation sees all tokens of its
layer, and host memory gets the new tokens, at every speed of the GPU.

The GPU is simulated (`played_gpus`).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.kernels.played_gpus import PlayedCuda, PlayedGpu, PlayedKernels, PlayedMark
from torch import Tensor

from labkit.kernels.cache_stream.device import CacheSlots, DeviceCacheStream
from labkit.kernels.cache_stream.host import HostCache, TokenShape
from labkit.kernels.int8_cache import SCALE_DTYPE
from labkit.kernels.slot_stream.queues import CpuQueues, DeviceSpans, GpuQueues, Queues
from labkit.kernels.types import LayerCache
from labkit.system.errors import UserError

CPU = torch.device("cpu")
HEADS, DIM, CAPACITY = 2, 16, 12
FLOAT = TokenShape(2, HEADS, DIM, torch.float32)
SHAPES = {"float32": FLOAT, "float16": TokenShape(1, HEADS, DIM, torch.float16)}
SHAPES["int8"] = TokenShape(3, 1, DIM, torch.int8)  # a token of these scales does not fill whole words
TEXT = (range(5), range(5, 6), range(6, 7), range(7, 7), range(7, 8), range(3, 9), range(9, 10))  # with one crop


def work_for(shape: TokenShape, batch: int, capacity: int) -> LayerCache:
    """Work memory for a layer, filled with wrong values."""
    rows = (batch, shape.heads, capacity)
    keys, values = (torch.full((*rows, shape.dim), 99, dtype=shape.dtype) for _ in range(2))
    scales = [torch.full(rows, 99, dtype=SCALE_DTYPE) for _ in range(2 if shape.dtype == torch.int8 else 0)]
    return LayerCache(keys, values, 0, None, *scales)


def parts(layer: LayerCache) -> list[Tensor]:
    return [tensor for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if tensor is not None]


class Text:
    """Expected keys and values of all layers, and the passes that produce them."""

    def __init__(self, gpu: PlayedGpu, queues: Queues, shape: TokenShape, layers: int, slots: int) -> None:
        self.gpu, self.shape, self.layers = gpu, shape, layers
        self.host = HostCache(queues, shape, layers, CAPACITY)
        self.slots = slots_for(queues, shape, slots, CAPACITY)
        self.stream = DeviceCacheStream(self.host, self.slots, 0, DeviceSpans(queues))
        self.expected = [[torch.zeros_like(part) for part in self._mine] for _ in range(layers)]
        self.wrong: list[str] = []
        self._random = torch.Generator().manual_seed(0)

    @property
    def _mine(self) -> list[Tensor]:
        return parts(self.stream.layer(0, 0))

    def compute_pass(self, written: range, left_after: int | None = None) -> None:
        """Each layer checks its contents, writes the new tokens, and spoils the work memory for the next layer.

        The pass may end early, after layer `left_after`.
        """
        with PlayedKernels(self.gpu, [self.slots.memory, *parts(self.slots.work)]):
            turns = self.stream.begin_pass(written)
            for layer in range(self.layers):
                turns.wait(layer)
                contents = [part[:, :, : written.start].clone() for part in self.expected[layer]]
                self.gpu.compute(partial(self._look, layer, written, contents))
                if layer == left_after:
                    return
                new = [self._drawn(part[:, :, written.start : written.stop]) for part in self._mine]
                for expected, tokens in zip(self.expected[layer], new, strict=True):
                    expected[:, :, written.start : written.stop] = tokens
                self.gpu.compute(partial(self._write, written, new))
                turns.release(layer)
                self.gpu.compute(self._spoil)

    def check(self, tokens: int) -> None:
        """Fails unless the host has the expected contents after all work is done."""
        self.gpu.finish_all()
        assert not self.wrong, self.wrong[0]
        for layer in range(self.layers):
            assert same(held_by(self.host, layer, tokens), [part[:, :, :tokens] for part in self.expected[layer]])

    def _drawn(self, like: Tensor) -> Tensor:
        return torch.randint(0, 90, like.shape, generator=self._random).to(like.dtype)

    def _look(self, layer: int, written: range, contents: list[Tensor]) -> None:
        if not same([part[:, :, : written.start] for part in self._mine], contents):
            self.wrong.append(f"layer {layer} was not whole when {written} were computed")

    def _write(self, written: range, new: list[Tensor]) -> None:
        for part, tokens in zip(self._mine, new, strict=True):
            part[:, :, written.start : written.stop] = tokens

    def _spoil(self) -> None:
        for part in parts(self.slots.work):
            part.fill_(99)


def slots_for(queues: Queues, shape: TokenShape, slots: int, capacity: int) -> CacheSlots:
    """Slots with room for one more sequence."""
    wider = TokenShape(shape.batch + 1, shape.heads, shape.dim, shape.dtype)
    return CacheSlots(queues, slots, capacity * wider.token_bytes, work_for(shape, wider.batch, capacity))


def held_by(host: HostCache, layer: int, tokens: int) -> list[Tensor]:
    """Keys, values and scales [B, H, T, ...] in host memory."""
    shape = host.shape
    numbers = [part.contiguous().view(shape.dtype) for part in host.shape.by_head(host.rows(layer, range(tokens)))[:2]]
    return [*numbers, *host.shape.by_head(host.rows(layer, range(tokens)))[2:]]


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(actual_part, expected_part) for actual_part, expected_part in zip(actual, expected, strict=True)
    )


@contextmanager
def queues_of(kind: str, seed: int, patch: pytest.MonkeyPatch) -> Iterator[tuple[PlayedGpu, Queues]]:
    """A simulated GPU, directly or through CUDA's events and streams."""
    gpu = PlayedGpu(seed)
    with ExitStack() as contexts:
        if kind == "cuda":
            contexts.enter_context(PlayedCuda(gpu, patch))
        yield gpu, GpuQueues(CPU) if kind == "cuda" else gpu


@pytest.mark.parametrize(("layers", "slots"), [(5, 1), (5, 2), (5, 3), (2, 2), (1, 1)])
@pytest.mark.parametrize("kind", ["played", "cuda"])
def test_every_layer_is_whole_when_it_is_used_and_written_back(
    kind: str, layers: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, tokens one by one, a pass that only reads, and a cache that is cropped in between."""
    for seed in range(12):
        with queues_of(kind, seed, monkeypatch) as (gpu, queues):
            text = Text(gpu, queues, FLOAT, layers, slots)
            for written in TEXT:
                text.compute_pass(written)
            text.check(10)
            stream = text.stream
            assert stream.blocks_written == len(TEXT) * layers
            assert stream.bytes_written == FLOAT.token_bytes * layers * sum(map(len, TEXT))
            assert stream.blocks_read == len(TEXT) * layers + slots


@pytest.mark.parametrize("name", SHAPES)
def test_no_more_than_the_filled_tokens_cross_the_link(name: str) -> None:
    """In every type, and for a batch that is smaller than the slots allow."""
    gpu, shape = PlayedGpu(0), SHAPES[name]
    text = Text(gpu, gpu, shape, 3, 2)
    for written in TEXT:
        text.compute_pass(written)
    text.check(10)
    read = sum(written.start for written in TEXT) * 3
    ahead = sum(before.stop - after.start for before, after in pairwise(TEXT)) * 2  # in vain because of a crop
    numbers = sum(part[:, :, 0].nbytes for part in parts(text.stream.layer(0, 0)))
    assert numbers <= shape.token_bytes < numbers + 8
    assert text.stream.bytes_read == shape.token_bytes * (read + ahead + 2 * TEXT[-1].stop)


@pytest.mark.parametrize("left_after", range(4))
def test_after_a_pass_that_was_left_the_next_begins_with_the_first_layer(left_after: int) -> None:
    for seed in range(12):
        gpu = PlayedGpu(seed)
        text = Text(gpu, gpu, FLOAT, 4, 2)
        text.compute_pass(range(4))
        text.compute_pass(range(4, 6), left_after)
        text.compute_pass(range(4, 5))
        text.compute_pass(range(5, 6))
        text.check(6)


def never(gpu: PlayedGpu) -> PlayedMark:
    """A mark that has already passed, so that nobody waits for it."""
    mark = PlayedMark()
    mark.passed = True
    return mark


class WithoutWaitOfCompute(PlayedGpu):
    def compute_after(self, mark: PlayedMark) -> None:
        super().compute_after(never(self))


class WithoutWaitOfCopy(PlayedGpu):
    def copy(self, to: Tensor, data: Tensor, after: PlayedMark) -> Any:
        return super().copy(to, data, never(self))


class WithoutWaitOfCopyBack(PlayedGpu):
    def copy_back(self, to: Tensor, data: Tensor, after: PlayedMark) -> Any:
        return super().copy_back(to, data, never(self))


@pytest.mark.parametrize("impatient", [WithoutWaitOfCompute, WithoutWaitOfCopy, WithoutWaitOfCopyBack])
def test_each_wait_is_needed(impatient: Callable[[int], PlayedGpu]) -> None:
    """If the GPU skips one kind of wait, these tests fail."""
    failures = 0
    for seed in range(12):
        gpu = impatient(seed)
        text = Text(gpu, gpu, FLOAT, 5, 2)
        for written in TEXT:
            text.compute_pass(written)
        try:
            text.check(10)
        except AssertionError:
            failures += 1
    assert failures


def test_one_cache_after_another_passes_through_the_same_slots() -> None:
    """Even while copies of the first cache are under way."""
    for seed in range(12):
        gpu = PlayedGpu(seed)
        first, second = (Text(gpu, gpu, FLOAT, 3, 2) for _ in range(2))
        second.slots = first.slots
        second.stream = DeviceCacheStream(second.host, first.slots, 0, DeviceSpans(gpu))
        for written in TEXT:
            for text in (first, second) if seed % 2 else (first,):
                text.stream = DeviceCacheStream(text.host, text.slots, written.start, DeviceSpans(gpu))
                text.compute_pass(written)
        if not seed % 2:
            second.compute_pass(range(7))
        first.check(10)
        second.check(10 if seed % 2 else 7)


CHANGES: dict[str, tuple[Callable[[HostCache], HostCache], list[int]]] = {
    "reorder": (lambda host: host.select(torch.tensor([1, 0]), 6), [1, 0]),
    "same": (lambda host: host.select(torch.tensor([0, 1]), 6), [0, 1]),
    "repeat": (lambda host: host.select(torch.tensor([0, 0, 1]), 6), [0, 0, 1]),
    "one": (lambda host: host.select(torch.tensor([1]), 6), [1]),
    "copy": (lambda host: host.copied(torch.tensor([0, 1]), 6), [0, 1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_waits_for_what_is_written_back(name: str) -> None:
    change, rows = CHANGES[name]
    for seed in range(6):
        gpu = PlayedGpu(seed)
        text = Text(gpu, gpu, FLOAT, 3, 2)
        text.compute_pass(range(5))
        text.compute_pass(range(5, 6))
        changed_host = change(text.host)
        for layer in range(3):
            assert same(held_by(changed_host, layer, 6), [part[rows, :, :6] for part in text.expected[layer]])
        if changed_host is not text.host:
            text.check(6)


def test_growing_keeps_what_is_held_and_fails_as_if_nothing_was_asked() -> None:
    """If pinning fails after a few layers, the other layers still have their old memory."""
    gpu = PlayedGpu(3)
    text = Text(gpu, gpu, FLOAT, 3, 2)
    text.compute_pass(range(6))
    pinned: list[int] = []

    def pin(memory: Tensor) -> None:
        pinned.append(memory.data_ptr())
        if len(pinned) == 3:
            raise UserError("no more")

    gpu.pin = pin  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no more"):
        text.host.grow(20, 6)
    assert text.host.capacity == CAPACITY
    text.compute_pass(range(6, 7))
    text.host.grow(20, 7)
    assert text.host.capacity == 20
    text.check(7)


def test_memory_is_unpinned_when_no_copy_uses_it_any_more() -> None:
    calls: list[str] = []

    class Noting(CpuQueues):
        def pin(self, memory: Tensor) -> None:
            calls.append("pin")

        def finish_copies(self) -> None:
            calls.append("finish")

        def unpin(self, memory: Tensor) -> None:
            calls.append("unpin")

    host = HostCache(Noting(), FLOAT, 2, CAPACITY)
    host.grow(CAPACITY + 1, 0)
    assert calls == ["pin", "pin", "finish", "pin", "unpin", "pin", "unpin"]
    calls.clear()
    del host
    gc.collect()
    assert calls == ["finish", "unpin", "unpin"]
