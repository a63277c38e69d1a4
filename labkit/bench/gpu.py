"""`make bench-gpu`: the engine on a GPU against vanilla transformers, and the regions of its layers.

python -P -m labkit.bench.gpu [--model MODEL] [--baseline NAME] [--quick] [--output FOLDER]

All sides of a model share one set of random weights, drawn on the GPU, in one process, and take turns. Each case is
written as soon as it is measured.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from labkit.bench.report import markdown_table
from labkit.bench.targets import Check
from labkit.harness.compare.baselines import BASELINES, Baseline, baseline
from labkit.harness.compare.interleave import first_difference
from labkit.harness.environment import Environment, read_environment
from labkit.harness.records import Case, Comparison, Measurement, Run
from labkit.harness.regions.measure import measure_regions
from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import FUSED, GRAPH, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.rounds import turns
from labkit.harness.timing import Times, timed_generate
from labkit.kernels import gpu
from labkit.kernels.tuned import slug
from labkit.models.policies import model_config_of
from labkit.models.shards import Cut
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.whole_file import write_whole
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

PROMPT, NEW, ROUNDS = 128, 128, 5
QUICK_NEW, QUICK_ROUNDS = 8, 2
DTYPE = torch.float16
OURS = ("fused", "fused-int8")
BASELINES_OF_GPU = ("hf-eager", "hf-static", "hf-graph")
OVER = {"hf-eager": 6.0, "hf-graph": 1.3}  # baseline / fused per token at batch 1, at least
BATCH_4 = 1.1  # time of a step at batch 4 over that at batch 1, at most


@dataclass(frozen=True)
class Target:
    """A model, and the milliseconds per token at batch 1 that its layers may take, with float16 and int8 weights."""

    model: str
    float16_ms: float
    int8_ms: float


TARGETS = (Target("gpt-j-6b", 3.1, 1.7), Target("bloom-7b1", 3.8, 2.2), Target("llama-2-7b", 3.5, 1.8))
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main(
    model: Annotated[list[str] | None, typer.Option(help="A preset; may be given again.")] = None,
    against: Annotated[list[str] | None, typer.Option("--baseline", help="May be given again.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be given again. Default: 1 and 4.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few tokens: whether it works, not how fast it is.")] = False,
    regions: Annotated[bool, typer.Option(help="Measure the regions of the layers too.")] = True,
    output: Annotated[Path | None, typer.Option(help="Folder; profiles, or runs with --quick.")] = None,
) -> None:
    """Measure this machine's GPU against the targets."""
    gpu.require()
    models = model or [target.model for target in TARGETS]
    baselines = tuple(against or BASELINES_OF_GPU)
    for name in baselines:
        if name not in BASELINES:
            raise UserError(f"unknown baseline {name!r}; expected one of {', '.join(BASELINES)}")
    environment = read_environment(torch.get_num_threads())
    stem = f"gpu-{slug(gpu.gpu_name() or 'interpreter')}-{datetime.now(UTC):%Y-%m-%d}{'-quick' if quick else ''}"
    file = (output or Path("runs" if quick else "profiles")) / f"{stem}.jsonl"
    records: list[Comparison] = []
    rows: list[RegionMeasurement] = []
    new, rounds = (QUICK_NEW, QUICK_ROUNDS) if quick else (NEW, ROUNDS)
    for name in models:
        source = OnDevice.of(name)
        for size in batch or (1, 4):
            with progress_bar(err) as follow:
                for index, found in enumerate(_compared(source, baselines, size, new, rounds)):
                    follow(index, rounds * (len(baselines) + len(OURS)), f"{name}, batch {size}")
                    records += found
            _write(file, records, rows, environment)
            for record in records[-2 * len(baselines) :]:
                out.print(_line(record), soft_wrap=True)
        del source
        _free()
        if regions:
            rows += _regions(name, QUICK_ROUNDS if quick else 2 * ROUNDS)
            _write(file, records, rows, environment)
    out.print(str(file.with_suffix(".md")), soft_wrap=True)


@dataclass(frozen=True)
class OnDevice:
    """A preset with random weights on the device, which all sides share."""

    name: str
    hf_config: PretrainedConfig
    model: PreTrainedModel

    @classmethod
    def of(cls, name: str) -> OnDevice:
        config = resolve(name).hf_config
        torch.manual_seed(0)
        with torch.device(gpu.default_device()):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, trust_remote_code=False).eval()
        model.generation_config.eos_token_id = None
        return cls(name, config, model)

    @property
    def tokenizer(self) -> None:
        """None: prompts are random tokens."""
        return None

    def hf_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A model of its own with the same parameters, so that a side may change its methods."""
        assert dtype == DTYPE
        return copy.copy(self.model)

    def names(self) -> set[str]:
        return self._tensors.names()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        return self._tensors.get(name, dtype, cut)

    @cached_property
    def _tensors(self) -> ModelTensors:
        return ModelTensors(self.model)


def _compared(
    source: OnDevice, baselines: Sequence[str], batch: int, new: int, rounds: int
) -> Iterator[list[Comparison]]:
    """After each run nothing, after the last the comparisons of "fused" and "fused-int8" with every baseline."""
    threads = torch.get_num_threads()
    names = (*baselines, *OURS)
    sides = {name: _side(name, source, threads) for name in names}
    config = model_config_of(source.hf_config)
    device = source.model.device
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, config.vocab_size, (rounds + 1, batch, PROMPT), generator=generator).to(device)
    how = {"attention_mask": torch.ones_like(prompts[0]), "do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    for side in sides.values():
        side.generate(prompts[rounds], **how)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    tokens: dict[str, list[Any]] = {name: [] for name in names}

    def run(name: str, index: int) -> tuple[Times, list[Any]]:
        times, sequences = timed_generate(sides[name], prompts[index], **how)
        return times, sequences[:, PROMPT:].tolist()

    for turn in turns([partial(run, name) for name in names], range(rounds), probe=lambda _: _probe()):
        times, new_tokens = turn.found
        runs[names[turn.side]].append(Run.of(times, round=turn.round, before=turn.before, after=turn.after))
        tokens[names[turn.side]].append(new_tokens)
        yield []
    case = Case(
        model=source.name,
        origin="random weights of the real shape",
        dtype="float16",
        batch=batch,
        prompt_tokens=PROMPT,
        new_tokens=new,
        threads=threads,
    )
    environment = read_environment(threads)
    measured = {
        name: Measurement(
            name=name,
            impl=side.impl,
            case=case,
            environment=environment,
            work=count_work(config, side.weights, batch, PROMPT, new),
            runs=tuple(runs[name]),
            nodes=side.graph_nodes,
        )
        for name, side in sides.items()
    }
    found = []
    for candidate in names[len(baselines) :]:
        for name in baselines:
            difference = first_difference(tokens[name], tokens[candidate])
            found.append(
                Comparison(
                    baseline=measured[name],
                    candidate=measured[candidate],
                    tokens_equal=difference is None,
                    first_difference=difference,
                )
            )
    sides.clear()
    _free()
    yield found


def _side(name: str, source: OnDevice, threads: int) -> Baseline:
    ours = {"impl": "triton"} if name.startswith("fused") else {}
    return baseline(name, cast(ModelSource, source), DTYPE, threads, **ours)


def _probe() -> float | None:
    return probe_bandwidth(torch.get_num_threads(), gpu.default_device())


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _regions(model: str, rounds: int) -> list[RegionMeasurement]:
    found: list[RegionMeasurement] = []
    for dtype in ("float16", "int8"):
        with progress_bar(err) as follow:
            how: dict[str, Any] = {"impl": "triton", "dtype": dtype, "context": PROMPT}
            found += measure_regions(model, regions=REGIONS, rounds=rounds, progress=follow, **how)
        _free()
    return found


def checks(records: Sequence[Comparison], rows: Sequence[RegionMeasurement]) -> Iterator[tuple[str, Check]]:
    """Every bar that the records can be held against, with the name of its case."""
    targets = {target.model: target for target in TARGETS}
    steps = {(record.case.model, record.candidate.name, record.case.batch): record.candidate for record in records}
    for (model, name, batch), side in steps.items():
        target, case = targets.get(model), f"{model} {name}, batch {batch}"
        if batch == 1 and target is not None:
            most = target.int8_ms if name == "fused-int8" else target.float16_ms
            took = side.per_token_ms
            yield case, Check("per token", f"{took:.2f} ms", f"≤ {most} ms", took <= most)
        if batch == 4 and name == "fused" and (model, name, 1) in steps:
            share = side.per_token_ms / steps[model, name, 1].per_token_ms
            yield case, Check("a step over that at batch 1", f"{share:.2f}x", f"≤ {BATCH_4}x", share <= BATCH_4)
    for record in records:
        bar = OVER.get(record.baseline.name)
        if bar is None or record.candidate.name != "fused" or record.case.batch != 1:
            continue
        ratio = record.ratio("per_token")
        what = f"{record.baseline.name} / fused"
        yield f"{record.case.model}, batch 1", Check(what, str(ratio), f"≥ {bar}x", ratio.value >= bar)
    for row in rows:
        if row.published is None or row.case.dtype != "float16":
            continue
        ratio, bar = row.ratio(), row.published[0]
        yield f"{row.case.model} {row.region}", Check("from Python", str(ratio), f"≥ {bar}x", ratio.value >= bar)


def page(records: Sequence[Comparison], rows: Sequence[RegionMeasurement], environment: Environment) -> str:
    """The Markdown page of a bench."""
    judged = list(checks(records, rows))
    missed = [f"- {case}, {check.what}: {check.figure} ({check})" for case, check in judged if not check.met]
    lines = [
        f"# The engine on a GPU: {gpu.gpu_name() or 'none, interpreted on the CPU, so that no time means anything'}",
        "",
        "Random float16 weights of the real shapes, shared by all sides of a model, which take turns in one process. "
        "The limit is reading a step's bytes at the bandwidth that a kernel that only reads reaches beside the runs. "
        "Ratios are baseline / candidate with 95 % intervals over rounds.",
        "",
        f"**{len(judged) - len(missed)} of {len(judged)} bars met.**" + (" Missed:" if missed else ""),
        "",
        *missed,
        "",
        "## Per token",
        "",
        markdown_table(STEP_TITLES, [_step_cells(record) for record in records]),
        "",
    ]
    for name in dict.fromkeys((row.case.model, row.case.dtype) for row in rows):
        cases = [row for row in rows if (row.case.model, row.case.dtype) == name]
        title = f"## Regions of {name[0]}, {name[1]}, batch 1: µs"
        lines += [title, "", markdown_table(REGION_TITLES, _cells(cases)), ""]
    lines += [f"{environment.machine}; {environment.versions}; commit {environment.commit}", ""]
    return "\n".join(lines)


STEP_TITLES = (
    "model", "batch", "baseline", "candidate", "baseline, ms", "candidate, ms", "ratio", "of the limit", "first token",
    "tokens",
)  # fmt: skip
REGION_SIDES = (UNFUSED, OWN_GEMM, SDPA, FUSED)
REGION_TITLES = (
    "region", "torch ops", *REGION_SIDES, *(f"{side}{GRAPH}" for side in REGION_SIDES),
    "unfused / fused", "both in graphs", "of the limit", "published",
)  # fmt: skip


def _step_cells(record: Comparison) -> list[str]:
    share = record.candidate.floor_share
    return [
        record.case.model,
        str(record.case.batch),
        record.baseline.name,
        record.candidate.name,
        f"{record.baseline.per_token_ms:.2f}",
        f"{record.candidate.per_token_ms:.2f}",
        str(record.ratio("per_token")),
        "–" if share is None else f"{share:.0%}",
        str(record.ratio("ttft")),
        "equal" if record.tokens_equal else f"equal up to {record.first_difference}",
    ]


def _cells(rows: Sequence[RegionMeasurement]) -> Iterator[list[str]]:
    for row in rows:
        times = [row.median_us(side) for side in (*REGION_SIDES, *(f"{side}{GRAPH}" for side in REGION_SIDES))]
        unfused, fused = row.in_engine
        share = row.floor_share(fused)
        yield [
            row.region,
            str(len(row.ops)),
            *("–" if took is None else f"{took:.1f}" for took in times),
            str(row.ratio()),
            str(row.ratio(unfused, fused)) if fused in row.rounds_us else "–",
            "–" if share is None else f"{share:.0%}",
            f"{row.published[0]:.1f}x" if row.published else "–",
        ]


def _line(record: Comparison) -> str:
    cells = _step_cells(record)
    return f"{cells[0]}, batch {cells[1]}: {cells[3]} {cells[5]} ms per token, {cells[6]} over {cells[2]}"


def _write(
    file: Path, records: Sequence[Comparison], rows: Sequence[RegionMeasurement], environment: Environment
) -> None:
    write_whole(file, "".join(record.model_dump_json() + "\n" for record in (*records, *rows)))
    write_whole(file.with_suffix(".md"), page(records, rows, environment))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
