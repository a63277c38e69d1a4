"""Engines whose layers, or whose keys and values, are read from a file, of the small models."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import vanilla

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.cache_stream import CacheStream
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream

READ, WRITE = os.O_RDONLY, os.O_WRONLY
LEAST = re.compile(r"the least is resident_gb = ([\d.]+) with (\d+) slots")


def least_gb(model: Any, folder: Path, slots: int = 2, **options: Any) -> float:
    """The least memory that an engine of this model works with, as the message says that refuses less."""
    with pytest.raises(ValueError, match=LEAST) as refused:
        labkit.init_inference(model, offload={"path": folder, "slots": slots, "resident_gb": 0}, **options)
    found = LEAST.search(str(refused.value))
    assert found is not None
    assert int(found[2]) == slots
    return float(found[1])


def streamed(name: str, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    """`vanilla(name)` with as few layers in memory as possible."""
    return streamed_model(vanilla(name), folder, slots, **options)


def streamed_model(model: Any, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    resident_gb = least_gb(model, folder, slots, **options)
    engine = labkit.init_inference(
        model, offload={"path": folder, "slots": slots, "resident_gb": resident_gb}, **options
    )
    assert isinstance(engine, FusedEngine)
    assert engine.streamed is not None
    return engine


def reader_of(engine: FusedEngine) -> LayerStream:
    """What reads the file."""
    stream = stream_of(engine).stream
    assert isinstance(stream, LayerStream)
    return stream


def stream_of(engine: FusedEngine) -> StreamedLayers:
    assert engine.streamed is not None
    return engine.streamed


def kv_on_disk(model: Any, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    """An engine whose keys and values lie in files in `folder`."""
    engine = labkit.init_inference(model, kv_offload={"path": folder, "slots": slots}, **options)
    assert isinstance(engine, FusedEngine)
    return engine


def kv_stream_of(cache: KVCache) -> CacheStream:
    assert isinstance(cache.stream, CacheStream)
    return cache.stream


@contextmanager
def able_only_to(can: int, folder: Path) -> Iterator[None]:
    """Within, descriptors of files in this folder can do no more than this: the rest fails as on a broken disk."""
    kept = []
    for number in descriptors(folder):
        less = os.open(f"/proc/self/fd/{number}", can | os.O_DIRECT)
        kept.append((number, os.dup(number)))
        os.dup2(less, number)
        os.close(less)
    assert kept
    yield
    for number, whole in kept:
        os.dup2(whole, number)
        os.close(whole)


def descriptors(folder: Path) -> list[int]:
    """Of the files in a folder, also of those without a name."""
    open_ones = {int(each): os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")}
    return [number for number, path in open_ones.items() if path.startswith(f"{folder.resolve()}/")]
