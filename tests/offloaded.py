"""Engines whose layers are read from a file, of the small models."""

import re
from pathlib import Path
from typing import Any

import pytest
from engines import vanilla

import labkit
from labkit.engine.engine import FusedEngine
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream

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
