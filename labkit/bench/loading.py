"""`make bench`, the part of loading: a rank's share from its own file against one file for all, seconds and memory.

python -P -m labkit.bench.loading [--gigabytes 2] [--ranks 2] [--rounds 7] [--output FOLDER]

A LLaMA of that size is written as one safetensors file, and packed, as a file for each rank. A round loads both: all
ranks at once, each a fresh process, with the files in the page cache. Memory is watched in runs that are not timed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import LlamaConfig

from labkit.bench.models import stem
from labkit.bench.report import markdown_table
from labkit.bench.targets import Check
from labkit.harness.environment import read_environment
from labkit.harness.load_record import ONE_FILE, OWN_FILES, LoadMeasurement
from labkit.harness.rounds import random_orders
from labkit.system.command import run_command
from labkit.system.progress import progress_bar
from labkit.system.whole_file import write_whole
from labkit.weights.checkpoint.tensor_stream import write_tensors
from labkit.weights.source import hf_shapes

SPEEDUP, MEMORY = 3.0, 1.15  # at least; at most, of a rank's share beside its largest tensor
DTYPE = torch.bfloat16
HIDDEN, INNER, VOCAB = 2048, 5632, 32000
WORKER = "labkit.bench.load_worker"
Loads = list[dict[str, float]]  # of each rank

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def write_model(folder: Path, gigabytes: float) -> int:
    """A LLaMA of noise of about this size in bfloat16, as `save_pretrained` lays it out: its bytes."""
    layer = 4 * HIDDEN**2 + 3 * HIDDEN * INNER
    layers = max(1, round((gigabytes * 1e9 / DTYPE.itemsize - 2 * VOCAB * HIDDEN) / layer))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        architectures=["LlamaForCausalLM"],
        dtype=DTYPE,
    )
    folder.mkdir(parents=True)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(DTYPE)
    tensors = {}
    for name, shape in sorted(hf_shapes(config).items()):
        count = math.prod(shape)
        tensors[name] = noise.repeat(-(-count // len(noise)))[:count].view(shape)
    config.to_json_file(folder / "config.json")
    return write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})[0]


def save_packed(folder: Path, target: Path, ranks: int) -> None:
    """The same model as `ranks` engines save it."""
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    worker = ["--no-python", sys.executable, "-P", "-m", WORKER, "save", str(folder), str(target), str(ranks)]
    subprocess.run([*torchrun, *worker], check=True, stderr=subprocess.DEVNULL)


def load(folder: Path, ranks: int, *, watch: bool = False) -> Loads:
    """What each of the ranks tells of loading its share, all at once."""
    more = ["--watch"] if watch else []
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, "load", folder, str(ranks), str(rank), *more],
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
            worker.stdin.write("\n")
            worker.stdin.flush()
        return [json.loads(worker.communicate()[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def main(
    gigabytes: Annotated[float, typer.Option(min=0.4, help="Of the model.")] = 2.0,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Loads of each kind, interleaved.")] = 7,
    output: Annotated[Path, typer.Option(help="Folder for record and page.")] = Path("profiles"),
) -> None:
    """Measure how ranks load a model on this machine."""
    environment = read_environment(ranks)
    file = output / f"{stem(environment, quick=False)}-loading.jsonl"
    seconds: dict[str, list[tuple[float, ...]]] = {ONE_FILE: [], OWN_FILES: []}
    orders = random_orders(len(seconds))
    with tempfile.TemporaryDirectory() as scratch, progress_bar(err) as follow:
        folders = {ONE_FILE: Path(scratch) / "one", OWN_FILES: Path(scratch) / "packed"}
        follow(0, rounds + 2, "writing the model")
        size = write_model(folders[ONE_FILE], gigabytes)
        save_packed(folders[ONE_FILE], folders[OWN_FILES], ranks)
        follow(1, rounds + 2, "watching memory")
        watched = {way: load(folder, ranks, watch=True) for way, folder in folders.items()}
        for done in range(rounds):
            follow(2 + done, rounds + 2, f"round {done + 1} of {rounds}")
            for way in (list(folders)[at] for at in next(orders)):
                seconds[way].append(tuple(rank["seconds"] for rank in load(folders[way], ranks)))
        follow(rounds + 2, rounds + 2, "done")
    found = LoadMeasurement(
        ranks=ranks,
        dtype=str(DTYPE).removeprefix("torch."),
        model_bytes=size,
        share_bytes=tuple(int(rank["share"]) for rank in watched[OWN_FILES]),
        largest_bytes=tuple(int(rank["largest"]) for rank in watched[OWN_FILES]),
        environment=environment,
        rounds_s={way: tuple(rounds) for way, rounds in seconds.items()},
        peak_bytes={way: tuple(int(rank["peak"]) for rank in ranks) for way, ranks in watched.items()},
    )
    write_whole(file, found.model_dump_json() + "\n")
    write_whole(file.with_suffix(".md"), page(found))
    for check in checks(found):
        out.print(f"{check.what}: {check.figure} ({check})", soft_wrap=True)
    out.print(str(file.with_suffix(".md")), soft_wrap=True)


def checks(found: LoadMeasurement) -> Iterator[Check]:
    """The bars of loading."""
    ratio = found.ratio()
    met, close = ratio.value >= SPEEDUP, ratio.low < SPEEDUP <= ratio.high
    yield Check(f"{ONE_FILE} / {OWN_FILES}", str(ratio), f"≥ {SPEEDUP:.0f}x", met, close=close)
    for way in (OWN_FILES, ONE_FILE):
        share = found.peak_share(way)
        what = f"peak memory from {way}, beside the largest tensor"
        yield Check(what, f"{share:.2f} of the share", f"≤ {MEMORY}", share <= MEMORY)


def page(found: LoadMeasurement) -> str:
    """The Markdown page of a record."""
    environment = found.environment
    sides = [
        (way, f"{np.median(found.seconds(way)):.2f}", f"{min(found.seconds(way)):.2f}", f"{found.peak_share(way):.2f}")
        for way in (ONE_FILE, OWN_FILES)
    ]
    lines = [
        f"# Loading on {environment.machine}",
        "",
        f"{found.ranks} ranks load a LLaMA of {found.model_bytes / 1e9:.2f} GB in {found.dtype}, all at once, each a "
        f"process of its own, from files in the page cache; {len(found.seconds(ONE_FILE))} rounds, one load of each "
        "kind in each, in random order. Seconds are those of the slowest rank until its weights are packed. From files "
        "of their own, every tensor is held against its digest.",
        "",
        markdown_table(("from", "s, median", "s, fastest", "peak memory less the largest tensor, of the share"), sides),
        "",
        markdown_table(("bar", "measured", ""), ((check.what, check.figure, str(check)) for check in checks(found))),
        "",
        environment.origin,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
