"""How long a rank takes to load its share, and how much memory: from its own file against one file for all.

python -P -m labkit.checkpoint.bench [--gigabytes 2] [--ranks 2] [--rounds 5]

A LLaMA of that size is written as one safetensors file, and packed, as a file for each rank. A round loads both: all
ranks at once, each a fresh process, with the files in the page cache. Memory is watched in runs that are not timed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import LlamaConfig

from labkit.checkpoint.tensor_stream import write_tensors
from labkit.source import hf_shapes
from labkit.statistics import Ratio, ratio

SPEEDUP, MEMORY = 3.0, 1.15
DTYPE = torch.bfloat16
HIDDEN, INNER, VOCAB = 2048, 5632, 32000
WORKER = "labkit.checkpoint.bench_worker"
Loads = list[dict[str, float]]  # of each rank


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


def measure(one: Path, packed: Path, ranks: int, rounds: int) -> tuple[Ratio, list[float], list[float]]:
    """Seconds from one file over seconds from files of their own, and the seconds of both."""
    seconds: dict[Path, list[float]] = {one: [], packed: []}
    rng = np.random.default_rng(0)
    for folder in (one, packed):
        load(folder, ranks)
    for _ in range(rounds):
        for folder in rng.permutation(np.array([one, packed], dtype=object)):
            seconds[folder].append(max(of_rank["seconds"] for of_rank in load(folder, ranks)))
    return ratio(seconds[one], seconds[packed]), seconds[one], seconds[packed]


def main(
    gigabytes: Annotated[float, typer.Option(min=0.1)] = 2.0,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=2)] = 5,
) -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        one, packed = Path(scratch) / "one", Path(scratch) / "packed"
        size = write_model(one, gigabytes)
        save_packed(one, packed, ranks)
        found, slow, fast = measure(one, packed, ranks, rounds)
        met = "met" if found.low >= SPEEDUP else "missed" if found.high < SPEEDUP else "within the interval"
        console.print(
            f"{ranks} ranks load a bfloat16 model of {size / 1e9:.2f} GB from one file in {np.median(slow):.2f} s, "
            f"each from its own in {np.median(fast):.2f} s: {found.value:.1f}x [{found.low:.1f}, {found.high:.1f}]; "
            f"bar {SPEEDUP}x: {met}"
        )
        for folder, text in ((packed, "its own file"), (one, "one file for all")):
            worst = max(
                run["peak"] / (run["share"] + run["largest"] / MEMORY) for run in load(folder, ranks, watch=True)
            )
            console.print(
                f"peak memory from {text}: {worst:.2f} of the share, beside the largest tensor; "
                f"bar {MEMORY}: {'met' if worst <= MEMORY else 'missed'}"
            )


if __name__ == "__main__":
    typer.run(main)
