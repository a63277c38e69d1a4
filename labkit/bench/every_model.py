"""Models without a row of their own, on the level that they get, against transformers, and against llama.cpp if it is
installed.

python -P -m labkit.bench.every_model [--only gemma-3-like] [--folder runs/every-model]

The models have random weights and are written into a folder first, as a user's models lie there. The files are
rewritten after each case, and a stopped bench goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from labkit.bench.bars import SHARE, BarCheck, at_least
from labkit.bench.page import (
    NONE,
    BenchFiles,
    EpochCount,
    Output,
    Threads,
    followed,
    llama_cpp_is_missing,
    machine_of,
    markdown_table,
    out,
    page_of,
    ratio_cell,
    stop_if_interrupted,
    verdict,
    way_of,
)
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.models.level_names import DERIVED, HOOKS
from labkit.system.command import run_command

PROMPT, NEW, EPOCHS = 128, 64, 6
FOLDER = Path("runs/every-model")
NEAR_THE_LIMIT = 0.85


@dataclass(frozen=True)
class BenchedModel:
    """A config of a class of transformers. limit_share: bar of the share of the limit in bfloat16; None: no bar."""

    name: str
    model_type: str
    sizes: Mapping[str, Any]
    limit_share: float | None = None


@dataclass(frozen=True)
class BenchedSides:
    """Two sides, in the dtype of the unquantised ones, and the least ratio of their times per token.

    near_limit: whether the models with a bar of the share of the limit are measured, too.
    """

    baseline: str
    candidate: str
    dtype: str
    per_token: float
    near_limit: bool = False


_wide = {"hidden_size": 1024, "vocab_size": 65536}
MODELS = (
    BenchedModel(
        "gemma-3-like",
        "gemma3_text",
        _wide
        | {"num_hidden_layers": 18, "intermediate_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"head_dim": 256},
    ),
    BenchedModel(
        "qwen3.5-like",
        "qwen3_5_text",
        _wide
        | {"num_hidden_layers": 16, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 128},
    ),
    BenchedModel(
        "phi-3-like",
        "phi3",
        {"hidden_size": 1536, "num_hidden_layers": 16, "intermediate_size": 4096, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "vocab_size": 32064},
    ),
    BenchedModel(
        "qwen3-moe-like",
        "qwen3_moe",
        _wide
        | {"num_hidden_layers": 16, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64},
    ),
    BenchedModel(
        "gemma-3-1b",
        "gemma3_text",
        {"hidden_size": 1152, "num_hidden_layers": 26, "intermediate_size": 6912, "num_attention_heads": 4}
        | {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144},
        NEAR_THE_LIMIT,
    ),
    BenchedModel(
        "phi-3-mini-8-layers",
        "phi3",
        {"hidden_size": 3072, "num_hidden_layers": 8, "intermediate_size": 8192, "num_attention_heads": 32}
        | {"num_key_value_heads": 32, "vocab_size": 32064},
        NEAR_THE_LIMIT,
    ),
    BenchedModel(
        "olmo-2-1b",
        "olmo2",
        {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "vocab_size": 100352},
        NEAR_THE_LIMIT,
    ),
)
SIDES = (
    BenchedSides("hf-eager", "fused", "float32", 1.8),
    BenchedSides("hf-eager", "fused", "bfloat16", 1.7, near_limit=True),
    BenchedSides("fused", "fused-int8", "bfloat16", 1.6),
    BenchedSides("fused", "fused-int4-64", "bfloat16", 2.0),
)
WITH_LLAMA_CPP = BenchedSides(LLAMA_CPP, "fused", "bfloat16", 1.1, near_limit=True)  # of models near the limit alone


def main(
    only: Annotated[list[str] | None, typer.Option(help="A model; may be repeated.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the models are written, once.")] = FOLDER,
    threads: Threads = None,
    rounds: EpochCount = EPOCHS,
    output: Output = None,
) -> None:
    """Measure models without a row of their own against transformers."""
    names = [model.name for model in MODELS]
    if unknown := set(only or ()) - set(names):
        raise typer.BadParameter(f"got {', '.join(unknown)}, expected some of {', '.join(names)}", param_hint="--only")
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), "every-model", output=output)
    records = files.kept(Comparison)
    peer = () if llama_cpp_is_missing() else (WITH_LLAMA_CPP,)
    for model in MODELS:
        if only and model.name not in only:
            continue
        path = written(model, folder)
        for sides in sides_of(model, peer):
            if any(_is_of(record, model, sides) for record in records):
                continue
            with followed(f"{model.name}, {sides.dtype}, {sides.candidate}") as follow:
                comparisons = compare_with_each(
                    (sides.baseline,),
                    sides.candidate,
                    comparison_case(
                        model=str(path), dtype=sides.dtype, batch=1, prompt=PROMPT, new=NEW, threads=threads
                    ),
                    Schedule(rounds=rounds, stages=False),
                    progress=follow,
                )
            stop_if_interrupted(comparisons)
            records += comparisons
            files.write(records, page(records))
            out.print(f"{model.name}: {escape(comparisons[0].claim())}", soft_wrap=True)
    files.finish(records, page(records))


def sides_of(model: BenchedModel, peer: tuple[BenchedSides, ...] = (WITH_LLAMA_CPP,)) -> tuple[BenchedSides, ...]:
    """The comparisons of a model. peer: the comparison with llama.cpp, where it is installed."""
    return SIDES if model.limit_share is None else tuple(sides for sides in (*SIDES, *peer) if sides.near_limit)


def written(model: BenchedModel, folder: Path) -> Path:
    """The folder of the model in bfloat16 with random weights, which is written if it is not there."""
    path = folder / model.name
    if not path.exists():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model.model_type](**model.sizes)
        unfinished = folder / f".{model.name}"
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        made.save_pretrained(unfinished)
        unfinished.rename(path)
    return path


def checks(model: BenchedModel, sides: BenchedSides, comparison: Comparison) -> Iterator[BarCheck]:
    """The bars of one comparison."""
    names = f"{sides.baseline} / {sides.candidate}"
    trusted = comparison.trust("per_token").trustworthy
    yield at_least(f"{names} per token", comparison.ratio("per_token"), sides.per_token, trusted=trusted)
    if sides.baseline == "hf-eager":
        trusted = comparison.trust("ttft").trustworthy
        yield at_least(f"{names} to the first token", comparison.ratio("ttft"), 1.0, trusted=trusted)
    if model.limit_share is not None and (share := comparison.candidate.floor_share) is not None:
        trusted = comparison.trust("per_token").trustworthy
        yield at_least("share of the limit", share, model.limit_share, SHARE, trusted=trusted)


def page(records: Sequence[Comparison]) -> str:
    """The Markdown page of the comparisons."""
    measured = [
        (model, sides, record)
        for model in MODELS
        for sides in sides_of(model)
        for record in records
        if _is_of(record, model, sides)
    ]
    judged = [
        (f"{model.name} {sides.dtype}", check) for model, sides, of in measured for check in checks(model, sides, of)
    ]
    environment = records[0].candidate.environment
    table = markdown_table(
        ("model", "dtype", "sides", "ms per token", "ratio", "first token", "share of the limit", "level"),
        [
            (
                model.name,
                sides.dtype,
                f"{sides.baseline} / {sides.candidate}",
                f"{of.baseline.per_token_ms:.2f} / {of.candidate.per_token_ms:.2f}",
                ratio_cell(of, "per_token"),
                ratio_cell(of, "ttft"),
                NONE if of.candidate.floor_share is None else f"{of.candidate.floor_share:.0%}",
                HOOKS if f" in {HOOKS}" in of.candidate.impl else DERIVED,
            )
            for model, sides, of in measured
        ],
    )
    return page_of(
        f"Models without a row of their own on {environment.machine}",
        f"Random weights. Prompt {PROMPT}, {NEW} new greedy tokens; {way_of(records)}. Ratios are baseline / candidate "
        "with 95 % intervals. A model whose row is derived runs on the fused kernels. In hooks transformers runs it, "
        "and its linears and MLPs run on labkit's kernels.",
        verdict(judged),
        "A share above 100 % means that the memory was faster in the turns than in the probes around them. Such "
        "figures are not trustworthy.",
        table,
        environment.origin,
    )


def _is_of(record: Comparison, model: BenchedModel, sides: BenchedSides) -> bool:
    case = record.case
    of = (Path(case.model).name, case.dtype, record.baseline.name, record.candidate.name)
    return of == (model.name, sides.dtype, sides.baseline, sides.candidate)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
