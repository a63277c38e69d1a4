"""The notebooks of the lab: small settings of each, and what its page has to show."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.studies.streaming_plans import saved_model, tight_gb

from labkit.widgets import (
    ExpertsBench,
    KernelBench,
    ParallelBench,
    PipelineBench,
    PrecisionBench,
    StreamingBench,
    TraceBench,
    Workbench,
)

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
Settings = dict[str, Any]


def _unchanged(folder: Path, settings: Settings) -> Settings:
    return settings


def _in_little_memory(folder: Path, settings: Settings) -> Settings:
    """A model with more layers than slots, in just enough memory for two sequences and three more layers."""
    model, disk = saved_model(folder / "small-llama"), folder / "disk"
    disk.mkdir()
    memory_gb = tight_gb(model, 3.5, prompt=6, new=5, threads=1, precision="float32")
    return settings | {"model": str(model), "memory_gb": memory_gb, "path": os.fspath(disk)}


@dataclass(frozen=True)
class NotebookCase:
    """A notebook with small settings."""

    stem: str
    bench: Any
    settings: Settings
    figures: int  # on its page
    headline: str  # a regular expression
    texts: tuple[str, ...] = ()  # on its page
    unanswered: int = 2  # questions of the exercise
    prepare: Callable[[Path, Settings], Settings] = _unchanged  # settings for a run in a folder

    @property
    def path(self) -> Path:
        return NOTEBOOKS / f"{self.stem}.ipynb"


ALL = (
    NotebookCase(
        "01_vanilla_vs_fused",
        Workbench,
        {"model": "tiny-gpt2", "prompt_tokens": 9, "new_tokens": 5, "rounds": 3, "threads": 1},
        figures=7,
        headline=r"fused against hf-eager, per token: [\d.]+x \[[\d.]+, [\d.]+\]",
    ),
    NotebookCase(
        "02_kernel_by_kernel",
        KernelBench,
        {"model": "tiny-llama", "context": 9, "rounds": 3, "threads": 2},
        figures=4 + 1 + 1 + 1 + 1,  # a drawing per region, the layer, the bars, the ladder, the roof
        headline=r"a layer fused in the one-call step against unfused torch ops: [\d.]+x \[[\d.]+, ",
        texts=("gives the right results on newly drawn layers",),
    ),
    NotebookCase(
        "03_timelines",
        TraceBench,
        {"source": "bundled"},
        figures=2 + 1 + 1,  # the stages of both sides, their timelines, the waterfall
        headline=r"^fused is faster than hf-eager by [\d.]+ ms \[[\d.]+, [\d.]+\] per decode step: ",
        texts=("not on this machine", "profil"),
        unanswered=1,
    ),
    NotebookCase(
        "04_tensor_parallel",
        ParallelBench,
        {"model": "tiny-gptj", "prompt_tokens": 9, "new_tokens": 5, "rounds": 2, "threads": 1},
        figures=2 + 1 + 1 + 1,  # two of the shards, the scaling, the step of every rank, the articles
        headline=r"^tiny-gptj, float32: 2 ranks of 1 thread against one, per token: [\d.]+x \[.*wait for each other",
        texts=("published, not measured here",),
        unanswered=4,
    ),
    NotebookCase(
        "05_precision",
        PrecisionBench,
        {
            "model": "tiny-gpt2", "precisions": "float32, int4-64+head8, int4-128", "question": "Where?", "tokens": 64,
            "new_tokens": 3, "rounds": 2, "threads": 1,
        },
        figures=4,  # the front, the cost of a token, the errors by matrix, the outliers
        headline=r"^tiny-gpt2: int4-64\+head8 against float32, per token: [\d.]+x \[(?!.*perplexity).*; KL \d",
        texts=(
            "cannot be: group_size=128 does not divide the 64 inputs",
            "perplexity means nothing",
            "no chat template",
        ),
        unanswered=1,
    ),
    NotebookCase(
        "06_larger_than_memory",
        StreamingBench,
        {
            "model": "tiny-llama", "precision": "float32", "memory_gb": 0.2, "batches": "1, 2, 100000",
            "prompt_tokens": 6, "new_tokens": 5, "baselines": "other-disk", "rounds": 2, "path": "", "threads": 1,
        },
        figures=5,  # gains by batch, the slots, the memory, the slider, the baselines
        headline=r"small-llama, float32, [\d.]+ times its memory: batch 1 gives [\d.,]+ tokens/s",
        texts=("does not fit: batch 100,000", "unknown side 'other-disk'"),
        prepare=_in_little_memory,
    ),
    NotebookCase(
        "07_pipeline",
        PipelineBench,
        {
            "model": "tiny-llama", "dtype": "float32", "stages": 2, "batch": 4, "prompt_tokens": 6, "new_tokens": 5,
            "schedules": "queue, barrier, naive", "micro_batches": "2, 4", "rounds": 2, "threads": 1,
        },
        figures=8,  # timeline, prompt, bubbles, sliders, micro-batches, ways to split, the paper, the puzzle
        headline=r"^tiny-llama, float32, 2 stages, batch 4, 6 \+ 5 tokens: .*"
        r"(x \[.*\] naive's|naive makes the most) tokens.*2 rounds, fewer than 6",
    ),
    NotebookCase(
        "08_experts",
        ExpertsBench,
        {
            "model": "tiny-moe", "dtype": "float32", "skew": 1.0, "batches": "1, 3", "prompt_tokens": 6,
            "new_tokens": 5, "ranks": 2, "in_memory": "30", "rounds": 2, "threads": 1,
        },
        figures=6,  # experts by layer, by token, what steps read, the choice, a step of each rank, experts on the disk
        headline=r"^tiny-moe: a table against one-hot products, 512 rows: [\d.]+x \[.*2 epochs, fewer than",
        texts=("published, not measured here", "router skewed by 1"),
    ),
)  # fmt: skip
CASES = {case.stem[:2]: case for case in ALL}
