"""A stream of layers into slots on a GPU: each computation sees the right layer in its slot, at every speed of the GPU,
and host memory is not overwritten while the GPU copies from it.

The GPU is simulated (`played_gpus`).
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kernels.played_gpus import PlayedCuda, PlayedGpu
from torch import Tensor

from labkit.kernels import build
from labkit.kernels.layer_stream import PAGE, Block, LayerStream, StreamSpan, digest_of
from labkit.kernels.layer_stream.device import DeviceStream, HeldBlocks
from labkit.kernels.slot_stream import require_whole
from labkit.kernels.slot_stream.queues import CpuQueues, GpuQueues
from labkit.system.errors import RunError, UserError

LAYERS, SIZE = 5, 64
CPU = torch.device("cpu")


class HastyHost:
    """Blocks of a file like `LayerStream`, in slots that are overwritten as soon as they are released.

    Block i consists of SIZE bytes with the value i. With `failed` the next block cannot be read.
    """

    path = Path("file")

    def __init__(self, slots: int, random: Random) -> None:
        self.blocks = tuple(Block(layer, layer * SIZE, SIZE, 0) for layer in range(LAYERS))
        self.slots, self.slot_bytes, self.failed = slots, SIZE, False
        self._memory, self.read_s = torch.empty(slots * SIZE, dtype=torch.uint8), 0.0
        self._released, self._random = 0, random
        self._fill(0)

    def begin_pass(self) -> int:
        self._fill(-(-self._released // LAYERS) * LAYERS)
        self.failed = False
        return self._released

    def wait(self, turn: int) -> None:
        assert self._released <= turn < self._released + self.slots, "it would wait forever"

    def filled(self, turn: int) -> bool:
        return self._released <= turn < self._released + self.slots and self._random.random() < 0.5

    def memory(self, turn: int) -> Tensor:
        begin = turn % self.slots * SIZE
        return self._memory[begin : begin + SIZE]

    def release(self, turn: int) -> None:
        assert turn == self._released, "blocks are released in their order"
        self._fill(turn + 1)

    def check(self) -> None:
        if self.failed:
            raise RunError("a broken disk")

    def take_spans(self) -> list[StreamSpan]:
        return []

    def close(self) -> None: ...

    def _fill(self, released: int) -> None:
        self._released = released
        for turn in range(released, released + self.slots):
            self.memory(turn).fill_(turn % LAYERS)


def held_blocks(random: Random) -> HeldBlocks:
    host = HeldBlocks(range(LAYERS), SIZE)
    for layer in range(LAYERS):
        host.memory(layer).fill_(layer)
    return host


HOSTS: dict[str, Callable[[Random], Any]] = {
    "held": held_blocks,
    "two slots": lambda random: HastyHost(2, random),
    "four slots": lambda random: HastyHost(4, random),
}


Contents = list[list[int]]  # contents of slots


def compute_pass(stream: DeviceStream, gpu: PlayedGpu, contents: Contents, layers: int = LAYERS) -> None:
    """Runs a pass, or its first layers; `contents` gets the bytes of their slots when the GPU computes with them."""

    def look(turn: int) -> None:
        contents.append(stream.memory(turn).tolist())

    first = stream.begin_pass()
    for turn in range(first, first + layers):
        stream.wait(turn)
        for _ in range(3):
            gpu.compute(partial(look, turn))
        if layers == LAYERS or turn < first + layers - 1:  # an abandoned pass does not release its last layer
            stream.release(turn)


def expected(layers: Sequence[int]) -> list[list[int]]:
    return [[layer] * SIZE for layer in layers for _ in range(3)]


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("host", HOSTS)
def test_every_layer_is_whole_in_its_slot_while_it_is_used(host: str, slots: int) -> None:
    for seed in range(30):
        gpu, contents = PlayedGpu(seed), Contents()
        stream = DeviceStream(HOSTS[host](gpu.random), slots, CPU, gpu)
        for _ in range(4):
            compute_pass(stream, gpu, contents)
        gpu.finish_all()
        assert contents == expected([*range(LAYERS)] * 4)
        assert 4 * LAYERS <= stream.blocks_read <= 4 * LAYERS + slots
        assert stream.bytes_read == SIZE * stream.blocks_read


@pytest.mark.parametrize("host", HOSTS)
def test_the_queues_of_cuda_keep_the_order_that_a_stream_of_layers_needs(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through CUDA's events and streams, which are simulated."""
    for seed in range(15):
        gpu, contents = PlayedGpu(seed), Contents()
        with PlayedCuda(gpu, monkeypatch):
            stream = DeviceStream(HOSTS[host](gpu.random), 2, CPU, GpuQueues(CPU))
            for _ in range(3):
                compute_pass(stream, gpu, contents)
        gpu.finish_all()
        assert contents == expected([*range(LAYERS)] * 3)


@pytest.mark.parametrize("host", HOSTS)
def test_after_a_pass_that_was_left_the_next_begins_with_the_first_layer(host: str) -> None:
    for seed in range(30):
        gpu, contents = PlayedGpu(seed), Contents()
        stream = DeviceStream(HOSTS[host](gpu.random), 3, CPU, gpu)
        layers_done = 1 + seed % (LAYERS - 1)
        for layers in (LAYERS, layers_done, LAYERS, LAYERS):
            compute_pass(stream, gpu, contents, layers)
        gpu.finish_all()
        assert contents == expected([*range(LAYERS), *range(layers_done), *range(LAYERS), *range(LAYERS)])


def test_a_pass_that_fails_goes_on_without_waiting_and_the_next_is_whole() -> None:
    for seed in range(30):
        gpu, contents = PlayedGpu(seed), Contents()
        host: Any = HastyHost(3, gpu.random)
        stream = DeviceStream(host, 2, CPU, gpu)
        compute_pass(stream, gpu, contents)
        first = stream.begin_pass()
        for turn in range(first, first + LAYERS):
            host.failed |= turn == first + seed % LAYERS
            stream.wait(turn)
            stream.release(turn)
        assert stream.pass_failed
        with pytest.raises(RunError, match="a broken disk"):
            stream.check()
        compute_pass(stream, gpu, contents)
        stream.check()
        gpu.finish_all()
        assert contents == expected([*range(LAYERS), *range(LAYERS)])


def written_blocks(file: Path) -> tuple[Any, list[Block]]:
    """The library of kernels, and the blocks of a file that is written here, two pages each."""
    library, size = build.load("float32"), 2 * PAGE
    data = torch.arange(LAYERS, dtype=torch.uint8).repeat_interleave(size)
    file.write_bytes(data.numpy().tobytes())
    pieces = enumerate(data.split(size))
    return library, [Block(layer, layer * size, size, digest_of(library, piece)) for layer, piece in pieces]


def test_a_file_is_read_on_into_the_slots_and_what_is_wrong_with_it_is_told(tmp_path: Path) -> None:
    """Through the host's slots, which are fewer than the layers, and after an error."""
    library, blocks = written_blocks(tmp_path / "layers")
    stream = DeviceStream(LayerStream(library, tmp_path / "layers", blocks, 2), 3, CPU)

    def layers_of_a_pass() -> list[int]:
        layers, first = [], stream.begin_pass()
        for turn in range(first, first + LAYERS):
            stream.wait(turn)
            (value,) = stream.memory(turn).unique().tolist()
            layers.append(value)
            stream.release(turn)
        return layers

    def three_passes() -> list[int]:
        layers = []
        for _ in range(3):
            layers += layers_of_a_pass()
            stream.check()
        return layers

    assert three_passes() == [*range(LAYERS)] * 3
    spans = stream.take_spans()
    assert sum(span.kind == "read" for span in spans) >= 3 * LAYERS
    for kind in ("wait", "compute"):
        assert [span.layer for span in spans if span.kind == kind] == [*range(LAYERS)] * 3
    assert [span.layer for span in spans if span.kind == "copy"][: 3 * LAYERS] == [*range(LAYERS)] * 3
    assert all(span.begin_ns <= span.end_ns for span in spans)
    with (tmp_path / "layers").open("r+b") as file:
        file.seek(blocks[3].offset)
        file.write(b"\x09")
    with pytest.raises(RunError, match=r"layer 3 of .* was altered"):
        three_passes()  # layers that were read before the change are intact
    written_blocks(tmp_path / "layers")
    assert layers_of_a_pass() == [*range(LAYERS)]
    stream.check()


def test_a_pass_stays_whole_when_reading_ahead_for_the_next_fails(tmp_path: Path) -> None:
    library, blocks = written_blocks(tmp_path / "layers")
    stream = LayerStream(library, tmp_path / "layers", blocks, 2)
    first = stream.begin_pass()
    for turn in range(first, first + LAYERS):
        stream.wait(turn)
        if turn == first + LAYERS - 1:  # no slot is free for the next pass yet
            (tmp_path / "layers").write_bytes(b"")
        stream.release(turn - 1)
    while not stream.failed:  # the next pass's first block is read ahead
        sleep(0.001)
    require_whole([stream], stream.pass_failed)
    stream.release(turn)
    written_blocks(tmp_path / "layers")
    turn = stream.begin_pass()
    stream.wait(turn)
    assert stream.memory(turn).unique().tolist() == [0]
    (tmp_path / "layers").write_bytes(b"")
    stream.release(turn)
    stream.wait(turn + 2)  # returns when it fails
    with pytest.raises(RunError, match="the file was cut short"):
        require_whole([stream], stream.pass_failed)


def test_memory_is_let_go_of_when_no_copy_reads_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Noting(CpuQueues):
        def pin(self, memory: Tensor) -> None:
            calls.append("pin")

        def finish_copies(self) -> None:
            calls.append("finish")

        def unpin(self, memory: Tensor) -> None:
            calls.append("unpin")

    library, blocks = written_blocks(tmp_path / "layers")
    stream = DeviceStream(LayerStream(library, tmp_path / "layers", blocks, 2), 2, CPU, Noting())
    close = stream.host.close

    def close_and_record() -> None:
        calls.append("close")
        close()

    monkeypatch.setattr(stream.host, "close", close_and_record)
    stream.pin(torch.empty(1, dtype=torch.uint8))
    assert calls == ["pin"]
    del stream
    gc.collect()
    assert calls == ["pin", "finish", "close", "unpin"]


def test_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def refuse(address: int, size: int, flags: int) -> int:
        requests.append((address, size))
        return 2  # cudaErrorMemoryAllocation

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    memory = torch.empty(12345, dtype=torch.uint8)
    with pytest.raises(
        UserError, match=r"12345 bytes of the host's memory can't be pinned .*CUDA error 2\); free some"
    ):
        GpuQueues.pin(memory)
    assert requests == [(memory.data_ptr(), 12345)]
