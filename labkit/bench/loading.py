"""`make bench`, the part about loading: time and memory of ranks that load from one file, and from their own files.

python -P -m labkit.bench.loading [--gigabytes 2] [--ranks 2] [--rounds 7] [--output FOLDER]

A LLaMA of that size is written as one safetensors file for all ranks, and packed as one file for each rank. A round
loads both: all ranks at once, each in a fresh process, with the files in the page cache. Memory is watched in untimed
runs. It is also watched in one process that loads the whole model from the one file in several precisions.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import LlamaConfig

from labkit.bench.bars import BarCheck, BarUnit, at_least, at_most
from labkit.bench.page import BenchFiles, Output, checks_table, err, machine_of, markdown_table, page_of, verdict
from labkit.bench.targets import LOAD_MEMORY, LOAD_PRECISIONS, LOAD_RATIO, LOADED, PACKED_MEMORY
from labkit.harness.environment import Environment, read_environment
from labkit.harness.load_record import ONE_FILE, OWN_FILES, LoadMeasurement, PackedMemory
from labkit.harness.rounds import random_orders
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.system.child import run_child
from labkit.system.command import run_command
from labkit.system.errors import RunError
from labkit.system.progress import progress_bar
from labkit.system.rounding import ceil_div
from labkit.weights.checkpoint.tensor_writer import write_tensors
from labkit.weights.resolve import resolve
from labkit.weights.source import hf_shapes

DTYPE = torch.bfloat16
OF_SHARE = BarUnit("{:.2f} of the share", "{:g}")
OF_PACKED = BarUnit("{:.2f} of the packed weights", "{:g}")
WORKER = "labkit.bench.load_worker"
Loads = list[dict[str, float]]  # of each rank


def write_model(folder: Path, gigabytes: float) -> int:
    """Writes a LLaMA of random bfloat16 weights of about this size, as `save_pretrained` does; returns its bytes."""
    hidden, inner, vocabulary = LOADED.hidden, LOADED.intermediate, LOADED.vocabulary
    layer = 4 * hidden**2 + 3 * hidden * inner
    layers = max(1, round((gigabytes * 1e9 / DTYPE.itemsize - 2 * vocabulary * hidden) / layer))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=LOADED.heads,
        architectures=["LlamaForCausalLM"],
        dtype=DTYPE,
    )
    folder.mkdir(parents=True)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(DTYPE)
    tensors = {}
    for name, shape in sorted(hf_shapes(config).items()):
        count = math.prod(shape)
        tensors[name] = noise.repeat(ceil_div(count, len(noise)))[:count].view(shape)
    config.to_json_file(folder / "config.json")
    return write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def sizes(folder: Path, ranks: int) -> tuple[tuple[int, int], ...]:
    """For each rank the bytes of all its tensors, and the bytes of the largest tensor."""
    config, ranks_bytes = model_config_of(resolve(folder).hf_config), []
    for part in (shard(config, ranks, rank) for rank in range(ranks)):
        layers = [part.shapes_of(layer).values() for layer in part.layers]
        shapes = [shape for group in (part.top_shapes.values(), *layers) for shape in group]
        tensors = [DTYPE.itemsize * math.prod(shape) for shape in shapes]
        ranks_bytes.append((sum(tensors), max(tensors)))
    return tuple(ranks_bytes)


def save_packed(folder: Path, target: Path, ranks: int) -> None:
    """Has `ranks` engines load the model and save their shares. RunError if they fail."""
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    worker = ["--no-python", sys.executable, "-P", "-m", WORKER, "save", str(folder), str(target), str(ranks)]
    run_child([*torchrun, *worker], f"{ranks} ranks could not save the model")


def load(folder: Path, ranks: int, precision: str = "bfloat16", *, watch: bool = False) -> Loads:
    """Has all ranks load their shares at the same time, and returns the measurements of each."""
    options = ["--precision", precision, *(["--watch"] if watch else [])]
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, "load", folder, str(ranks), str(rank), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for worker in workers:
            assert worker.stdout
            worker.stdout.readline()
        for worker in workers:
            assert worker.stdin
            with suppress(BrokenPipeError):  # it has ended, and says so below
                worker.stdin.write("\n")
                worker.stdin.flush()
        return [_loaded(worker) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def _loaded(worker: subprocess.Popen[str]) -> dict[str, float]:
    """The measurement of a worker, which then ends. RunError if it failed."""
    reply, _ = worker.communicate()
    if worker.returncode != 0:
        raise RunError(f"a rank could not load the model (exit code {worker.returncode}); its output is above")
    measurement: dict[str, float] = json.loads(reply)
    return measurement


def main(
    gigabytes: Annotated[float, typer.Option(min=0.4, help="Size of the model.")] = 2.0,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Loads of each kind, interleaved.")] = 7,
    output: Output = None,
) -> None:
    """Measure the loading of a model by several ranks on this machine."""
    environment = read_environment(ranks)
    files = BenchFiles.of(machine_of(environment), "loading", output=output)
    measurement = measure(gigabytes, ranks, rounds, environment)
    files.finish([measurement], page(measurement), checks(measurement))


def measure(gigabytes: float, ranks: int, rounds: int, environment: Environment) -> LoadMeasurement:
    """Writes the model both ways, watches the memory of each way once, and times both ways in turns."""
    seconds: dict[str, list[tuple[float, ...]]] = {ONE_FILE: [], OWN_FILES: []}
    ways, orders = tuple(seconds), random_orders(len(seconds))
    with tempfile.TemporaryDirectory() as scratch, progress_bar(err) as follow:
        folders = {ONE_FILE: Path(scratch) / "one", OWN_FILES: Path(scratch) / "packed"}
        follow(0, rounds + 2, "writing the model")
        size = write_model(folders[ONE_FILE], gigabytes)
        shares, largest = zip(*sizes(folders[ONE_FILE], ranks), strict=True)
        save_packed(folders[ONE_FILE], folders[OWN_FILES], ranks)
        follow(1, rounds + 2, "watching memory")
        watched = {way: load(folder, ranks, watch=True) for way, folder in folders.items()}
        alone = {name: load(folders[ONE_FILE], 1, name, watch=True)[0] for name in LOAD_PRECISIONS}
        for done in range(rounds):
            follow(2 + done, rounds + 2, f"round {done + 1} of {rounds}")
            for way in (ways[index] for index in next(orders)):
                seconds[way].append(tuple(rank["seconds"] for rank in load(folders[way], ranks)))
        follow(rounds + 2, rounds + 2, "done")
    return LoadMeasurement(
        ranks=ranks,
        dtype=str(DTYPE).removeprefix("torch."),
        model_bytes=size,
        share_bytes=shares,
        largest_bytes=largest,
        environment=environment,
        rounds_s={way: tuple(of_way) for way, of_way in seconds.items()},
        peak_bytes={way: tuple(int(rank["peak"]) for rank in loads) for way, loads in watched.items()},
        precisions={
            name: PackedMemory(peak=int(rank["peak"]), packed=int(rank["packed"])) for name, rank in alone.items()
        },
    )


def checks(measurement: LoadMeasurement) -> Iterator[BarCheck]:
    """The checks of loading."""
    yield at_least(f"{ONE_FILE} / {OWN_FILES}", measurement.ratio(), LOAD_RATIO)
    for way in (OWN_FILES, ONE_FILE):
        figure = f"peak memory from {way}, less the largest tensor"
        yield at_most(figure, measurement.peak_share(way), LOAD_MEMORY, OF_SHARE)
    for name, memory in measurement.precisions.items():
        yield at_most(f"peak memory of one process, {name}", memory.share, PACKED_MEMORY, OF_PACKED)


def page(measurement: LoadMeasurement) -> str:
    """The Markdown page of a record."""
    sides = [
        (
            way,
            f"{np.median(measurement.seconds(way)):.2f}",
            f"{min(measurement.seconds(way)):.2f}",
            f"{measurement.peak_share(way):.2f}",
        )
        for way in (ONE_FILE, OWN_FILES)
    ]
    precisions = [
        (name, f"{memory.packed / 1e6:.0f}", f"{memory.peak / 1e6:.0f}", f"{memory.share:.2f}")
        for name, memory in measurement.precisions.items()
    ]
    return page_of(
        f"Loading on {measurement.environment.machine}",
        f"{measurement.ranks} ranks load a LLaMA of {measurement.model_bytes / 1e9:.2f} GB in {measurement.dtype}, all "
        "at once, each in its own process, from files in the page cache; "
        f"{len(measurement.seconds(ONE_FILE))} rounds with one load of each kind in random order. Seconds are the time "
        "of the slowest rank until its weights are packed. Tensors in the ranks' own files are checked against their "
        "digests.",
        verdict([("loading", check) for check in checks(measurement)]),
        markdown_table(("from", "s, median", "s, fastest", "peak memory less the largest tensor, of the share"), sides),
        "One process that loads the whole model from the one file:",
        markdown_table(("precision", "packed, MB", "peak memory, MB", "peak / packed"), precisions),
        checks_table(checks(measurement)),
        measurement.environment.origin,
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
