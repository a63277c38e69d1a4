"""Keys and values in a file: every pass reads the data of earlier passes, and moves no more bytes than needed."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.kernels import build
from labkit.kernels.cache_stream import CacheFile, CacheShape, CacheStream
from labkit.kernels.slot_stream import PAGE
from labkit.kernels.types import LayerCache

SHAPES = {
    "float32": CacheShape.fitting(layers=4, batch=2, heads=5, capacity=100, dim=80, dtype=torch.float32),
    "int8": CacheShape.fitting(layers=3, batch=3, heads=1, capacity=2100, dim=48, dtype=torch.int8),
    "one layer": CacheShape.fitting(layers=1, batch=1, heads=2, capacity=500, dim=16, dtype=torch.bfloat16),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def stream_of(folder: Path, shape: CacheShape, slots: int = 2) -> CacheStream:
    """An empty stream, whose slots are filled with 0xFF, so that unwritten bytes show."""
    stream = CacheStream(build.load("float32"), CacheFile(folder, shape), slots, filled=0)
    for turn in range(slots):
        stream.memory(turn).fill_(0xFF)
    return stream


def tensors(layer: LayerCache) -> list[Tensor]:
    """Bytes [B, H, C, bytes of a token] of keys and values, then of scales if there are any."""
    parts = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return [part.view(*part.shape[:3], -1).view(torch.uint8) for part in parts if part is not None]


def written(stream: CacheStream, tokens: range, seed: int) -> list[list[Tensor]]:
    """Writes random tokens in a pass; returns them layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    turns, layers_written = stream.begin_pass(tokens), []
    for index in range(stream.file.shape.layers):
        turns.wait(index)
        stream.check()
        layer = tensors(turns.layer(index))
        layers_written.append(
            [torch.randint(256, part[:, :, tokens].shape, generator=generator).byte() for part in layer]
        )
        for part, new in zip(layer, layers_written[-1], strict=True):
            part[:, :, tokens.start : tokens.stop] = new
        turns.release(index)
    return layers_written


def read_back(stream: CacheStream, tokens: int) -> list[list[Tensor]]:
    """Reads the first `tokens` of all layers, in a pass that writes nothing."""
    turns, layers_read = stream.begin_pass(range(tokens, tokens)), []
    for index in range(stream.file.shape.layers):
        turns.wait(index)
        stream.check()
        layers_read.append([part[:, :, :tokens].clone() for part in tensors(turns.layer(index))])
        turns.release(index)
    return layers_read


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@shapes
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_pass_finds_what_those_before_it_wrote(shape: CacheShape, slots: int, tmp_path: Path) -> None:
    """Prompts, single tokens, and a text that is cropped before it continues; also with more slots than layers."""
    stream = stream_of(tmp_path, shape, slots)
    expected: list[list[Tensor]] = []
    for seed, (past, end) in enumerate([(0, 7), (7, 8), (8, 97), (97, 98), (60, 62), (62, 63)]):
        new = written(stream, range(past, end), seed)
        earlier = expected or [[part[:, :, :0] for part in layer] for layer in new]
        expected = [
            [torch.cat((old[:, :, :past], fresh), dim=2) for old, fresh in zip(*layers, strict=True)]
            for layers in zip(earlier, new, strict=True)
        ]
        if seed % 2:
            assert same(read_back(stream, end), expected)
    assert same(read_back(stream, 63), expected)


def test_no_more_pages_move_than_the_tokens_take(tmp_path: Path) -> None:
    """A page holds 64 tokens of a row. Only filled pages are read, and only touched pages are written."""
    shape = CacheShape.fitting(layers=3, batch=2, heads=2, capacity=640, dim=16, dtype=torch.float32)
    assert [(section.rows, section.row_bytes) for section in shape.sections] == [(8, 10 * PAGE)]
    stream = stream_of(tmp_path, shape)
    counts = [(0, 0)]
    for tokens in (range(100), range(100, 101), range(101, 128), range(128, 129), range(129, 400)):
        written(stream, tokens, 0)
        stream.flush()
        counts.append((stream.blocks_written, stream.bytes_written))
    pages = [(later[1] - earlier[1]) // (8 * PAGE) for earlier, later in pairwise(counts)]
    assert pages == [3 * 2, 3, 3, 3, 3 * 5]
    assert counts[-1][0] == 5 * 3
    fresh = CacheStream(build.load("float32"), stream.file, 3, filled=400)
    read_back(fresh, 400)
    counts = [(fresh.blocks_read, fresh.bytes_read)]
    while (latest := (fresh.blocks_read, fresh.bytes_read)) != counts[-1]:  # the next pass is read ahead meanwhile
        counts.append(latest)
    assert latest[1] == latest[0] * 7 * 8 * PAGE


@shapes
def test_a_file_is_copied_with_other_sequences_and_more_room(shape: CacheShape, tmp_path: Path) -> None:
    """The original file does not change."""
    stream = stream_of(tmp_path, shape)
    expected = written(stream, range(90), 1)
    stream.flush()
    rows = torch.tensor([shape.batch - 1, 0, 0])
    copy = stream.file.copied(rows, 3 * shape.capacity, 90)
    assert (copy.shape.batch, copy.shape.layers) == (3, shape.layers)
    assert copy.shape.capacity >= 3 * shape.capacity
    library = build.load("float32")
    assert same(
        read_back(CacheStream(library, copy, 2, 90), 90), [[part[rows] for part in layer] for layer in expected]
    )
    assert same(read_back(stream, 90), expected)


@shapes
def test_files_become_one_and_a_file_goes_on_with_fewer_sequences(shape: CacheShape, tmp_path: Path) -> None:
    """The original files do not change. A file that loses sequences becomes shorter in proportion."""
    streams = [stream_of(tmp_path, replace(shape, batch=batch)) for batch in (shape.batch, 2, 1)]
    contents = [written(stream, range(90), seed) for seed, stream in enumerate(streams)]
    for stream in streams:
        stream.flush()
    whole = [[torch.cat(parts) for parts in zip(*layers, strict=True)] for layers in zip(*contents, strict=True)]
    library, rows = build.load("float32"), torch.arange(shape.batch + 3).flip(0)
    combined = CacheFile.gathered([stream.file for stream in streams], rows, shape.capacity, 90)
    assert same(
        read_back(CacheStream(library, combined, 2, 90), 90), [[part[rows] for part in layer] for layer in whole]
    )
    assert all(same(read_back(stream, 90), content) for stream, content in zip(streams, contents, strict=True))
    remaining = torch.tensor([shape.batch + 2, 1])
    fewer = combined.shrunk(remaining, 90)
    fewer_stream = CacheStream(library, fewer, 2, 90)
    assert same(read_back(fewer_stream, 90), [[part[rows[remaining]] for part in layer] for layer in whole])
    new = written(fewer_stream, range(90, 95), 7)
    assert same([[part[:, :, 90:] for part in layer] for layer in read_back(fewer_stream, 95)], new)
    assert os.fstat(fewer.descriptor()).st_size == fewer.shape.layers * fewer.shape.layer_bytes


def test_a_pass_that_was_left_is_skipped(tmp_path: Path) -> None:
    """Writes of the abandoned pass do not count."""
    stream = stream_of(tmp_path, SHAPES["float32"])
    expected = written(stream, range(9), 1)
    for layers in (0, 1, 2):
        turns = stream.begin_pass(range(9, 10))
        for index in range(layers):
            turns.wait(index)
            turns.layer(index).keys[:, :, 9] = 5
            turns.release(index)
        assert same(read_back(stream, 9), expected)


def test_memory_is_that_of_the_slots(tmp_path: Path) -> None:
    """Eight layers of 16 MiB pass twice through two slots, and are copied."""
    shape = CacheShape.fitting(layers=8, batch=2, heads=4, capacity=8192, dim=32, dtype=torch.float32)
    assert shape.layer_bytes == 16 << 20
    reset_peak_memory()
    start = read_memory().peak
    stream = CacheStream(build.load("float32"), CacheFile(tmp_path, shape), 2, filled=0)
    for step in range(2):
        turns = stream.begin_pass(range(step * 4096, 4096 * (step + 1)))
        for index in range(shape.layers):
            turns.wait(index)
            stream.check()
            turns.layer(index).keys[:, :, step * 4096 : 4096 * (step + 1)] = index
            turns.release(index)
    stream.flush()
    stream.file.copied(torch.arange(2), 9000, 8192)
    used = read_memory().peak - start
    assert (1 << 20) < used < 2 * shape.layer_bytes + (24 << 20)
