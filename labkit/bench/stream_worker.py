"""One engine of `labkit.bench.streaming`, which streams layers in its own process.

python -P -m labkit.bench.stream_worker MODEL PRECISION FOLDER --resident-gb GB [--slots N] [--prompt N] [--new N]

Prints one line of JSON: the fields of a `StreamMeasurement` that this process knows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Annotated, Any

import torch
import typer

from labkit.engine import InferenceEngine, init_inference
from labkit.harness.disk import read_rate_gb_s
from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.harness.stream_record import Overlapped, StreamRound
from labkit.harness.streaming.epoch import slots_filled
from labkit.harness.timing import TokenClock, timed_generate
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream
from labkit.kernels.memory import return_freed_memory
from labkit.system.page_cache import cached_bytes
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve

PROBE_S = 0.7
app = typer.Typer(add_completion=False)


@app.command()
def run(
    model: str,
    precision: str,
    folder: Path,
    resident_gb: Annotated[float, typer.Option()],
    slots: Annotated[int, typer.Option()] = 3,
    batch: Annotated[int, typer.Option()] = 1,
    prompt: Annotated[int, typer.Option()] = 16,
    new: Annotated[int, typer.Option()] = 8,
    rounds: Annotated[int, typer.Option()] = 6,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    torch.set_num_threads(threads)
    source = resolve(model)
    before = read_memory().now
    offload = {"device": "disk", "path": folder, "resident_gb": resident_gb, "slots": slots}
    begun = perf_counter()
    engine = init_inference(source, offload=offload, **precision_of(precision).options)
    ready = perf_counter() - begun
    return_freed_memory()
    reset_peak_memory()  # the memory of packing must not count as memory of running
    streamed = engine.streamed
    assert streamed is not None, f"{resident_gb} GB hold all of {model} in {precision}"
    ids = torch.arange(batch * prompt).view(batch, prompt) % source.hf_config.vocab_size
    engine.generate(ids[:, :1], max_new_tokens=2, do_sample=False, pad_token_id=0)  # compiles, fills caches
    stream = streamed.stream
    assert isinstance(stream, LayerStream)
    read_before = stream.blocks_read
    measured = [_round(engine, streamed, ids, new) for _ in range(rounds)]
    passes = rounds * new
    line: dict[str, Any] = {
        "layers": len(streamed.blocks),
        "streamed_layers": len(streamed.layers),
        "file_bytes": stream.path.stat().st_size,
        "streamed_bytes": streamed.bytes_per_step,
        "resident_bytes": streamed.resident_bytes,
        "allowed_bytes": round(resident_gb * 1e9),
        "peak_bytes": read_memory().peak - before,
        "cached_bytes": cached_bytes(stream.path),
        "reads_per_step": (stream.blocks_read - read_before) / len(streamed.layers) / passes,
        "direct": stream.direct,
        "ready_s": ready,
        "rounds": [stream_round.model_dump() for stream_round in measured],
    }
    sys.stdout.write(json.dumps(line) + "\n")


def _round(engine: InferenceEngine, streamed: StreamedLayers, ids: torch.Tensor, new: int) -> StreamRound:
    """Runs a prompt and the steps after it, with probes of the disk between them, while the engine's reading rests."""
    stream, rates = streamed.stream, list[float]()
    assert isinstance(stream, LayerStream)

    def probe() -> None:
        stream.rest()
        rates.append(read_rate_gb_s(stream.path, PROBE_S))

    probe()
    greedy: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new, "max_new_tokens": new}
    slots_filled(streamed)
    clock = _PausingClock(probe)
    times, _ = timed_generate(engine, ids, streamer=clock, stamps_ns=lambda: clock.stamps_ns, **greedy)
    spans = stream.take_spans()
    first, last = clock.stamps_ns[0], clock.stamps_ns[-1] + clock.paused_ns
    probe()
    return StreamRound(
        disk_gb_s=(rates[0], rates[1], rates[2]),
        prompt=Overlapped.of(1, first - round(times.ttft_ms * 1e6), first, spans),
        decode=Overlapped.of(new - 1, first + clock.paused_ns, last, spans),
    )


class _PausingClock(TokenClock):
    """A clock that calls `pause` after the prompt's token, and leaves this time out of the stamps."""

    def __init__(self, pause: Callable[[], object]) -> None:
        super().__init__()
        self._pause, self.paused_ns = pause, 0

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 2:
            return
        now = perf_counter_ns()
        self.stamps_ns.append(now - self.paused_ns)
        if len(self.stamps_ns) == 1:
            self._pause()
            self.paused_ns = perf_counter_ns() - now


if __name__ == "__main__":
    app()
