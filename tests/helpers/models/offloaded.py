"""Engines of the small models with offloaded layers, or with an offloaded KV cache."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.models.engines import vanilla

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.cache_stream import CacheStream
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream

READ, WRITE = os.O_RDONLY, os.O_WRONLY
LEAST_OF_EXPERTS = re.compile(r"the least is resident_gb = ([\d.]+), which holds everything besides the experts")
LEAST = re.compile(r"the least is resident_gb = ([\d.]+) with (\d+) slots")


def least_resident_gb(model: Any, offload: dict[str, Any], **options: Any) -> float:
    """Least memory that an engine with these options needs, from the message that refuses less."""
    with pytest.raises(ValueError, match=LEAST) as refused:
        labkit.init_inference(model, offload=offload | {"resident_gb": 0}, **options)
    match = LEAST.search(str(refused.value))
    assert match is not None
    assert int(match[2]) == offload["slots"]
    return float(match[1])


def least_gb(model: Any, folder: Path, slots: int = 2, **options: Any) -> float:
    """Least memory that an engine needs which reads its layers from a file in `folder`."""
    return least_resident_gb(model, {"path": folder, "slots": slots, "experts": False}, **options)


def streamed(name: str, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    """`vanilla(name)` with as few resident layers as possible."""
    return streamed_model(vanilla(name), folder, slots, **options)


def streamed_model(model: Any, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    resident_gb = least_gb(model, folder, slots, **options)
    engine = labkit.init_inference(
        model, offload={"path": folder, "slots": slots, "resident_gb": resident_gb, "experts": False}, **options
    )
    assert isinstance(engine, FusedEngine)
    assert engine.streamed is not None
    return engine


def reader_of(engine: FusedEngine) -> LayerStream:
    """Stream that reads the engine's file of layers."""
    stream = stream_of(engine).stream
    assert isinstance(stream, LayerStream)
    return stream


def stream_of(engine: FusedEngine) -> StreamedLayers:
    assert engine.streamed is not None
    return engine.streamed


def kv_on_disk(model: Any, folder: Path, slots: int = 2, **options: Any) -> FusedEngine:
    """Engine whose keys and values are in files in `folder`."""
    engine = labkit.init_inference(model, kv_offload={"path": folder, "slots": slots}, **options)
    assert isinstance(engine, FusedEngine)
    return engine


def kv_stream_of(cache: KVCache) -> CacheStream:
    assert isinstance(cache.stream, CacheStream)
    return cache.stream


def flip_byte(file: Path, offset: int) -> None:
    """Inverts the bits of a byte; a second call restores it."""
    with file.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte[0] ^ 0xFF]))


@contextmanager
def able_only_to(can: int, folder: Path) -> Iterator[None]:
    """Context in which files open in `folder` allow only access mode `can`. Other access fails as on a broken disk."""
    originals = []
    for number in descriptors(folder):
        limited = os.open(f"/proc/self/fd/{number}", can | os.O_DIRECT)
        originals.append((number, os.dup(number)))
        os.dup2(limited, number)
        os.close(limited)
    assert originals
    yield
    for number, original in originals:
        os.dup2(original, number)
        os.close(original)


def descriptors(folder: Path) -> list[int]:
    """Descriptors of the open files in a folder, even of files without a name."""
    paths = {int(name): os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    return [number for number, path in paths.items() if path.startswith(f"{folder.resolve()}/")]
