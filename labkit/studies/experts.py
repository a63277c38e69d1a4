"""The study of a mixture of experts: what rows choose, what steps read, and what the choice costs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from labkit.engine import init_inference
from labkit.engine.engine import DecoderEngine
from labkit.engine.team_size import team_size
from labkit.harness.compare.plan import Schedule
from labkit.harness.environment import read_environment
from labkit.harness.results import save_or_warn
from labkit.kernels.decode_step import MixtureMlp
from labkit.models.config import ExpertsSpec, ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.models.policies import known_policy
from labkit.stages import Phase, Stage
from labkit.studies.expert_pairs import ROUTED, routing, sparse_and_dense
from labkit.studies.experts_study import ExpertsStudy, ReadByBatch, StudiedMixture, save_study
from labkit.studies.settings import Epochs, FloatDtype, Model, NewTokens, PromptTokens, StudySetting, Threads
from labkit.system.bounds import check_numbers
from labkit.system.comma_list import listed_counts
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, part_of, unheard
from labkit.weights.resolve import resolve
from labkit.weights.skewed_router import SkewedRouter
from labkit.weights.source import ModelSource

STEPS = 6  # decode steps of each batch
BUDGET_S = 20.0  # of each pair of ways


def study_experts(
    *,
    model: Model = "moe-shape",
    dtype: FloatDtype = "bfloat16",
    skew: Annotated[
        float,
        StudySetting("of random routers: 0 chooses almost evenly; more prefers the first experts of a layer", (0, 100)),
    ] = 0.0,
    batches: Annotated[
        str, StudySetting("batch sizes, separated by commas", check=lambda text: parse_batches(text))
    ] = "1,2,4,8,16,32",
    prompt_tokens: PromptTokens = 32,
    new_tokens: NewTokens = 32,
    rounds: Epochs = 0,
    threads: Threads = 0,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> ExpertsStudy:
    """Generates a text and notes the experts of every token; counts what steps of several batches read; and measures,
    in turns, the experts of one row against a dense MLP of as many bytes, and a table against one-hot products.

    - skew: see `SkewedRouter`.
    - rounds: number of epochs; 0: until there is a verdict, or BUDGET_S seconds are spent for a pair.
    - output: folder for the record, which `load_study` reads.
    - progress: receives the progress.
    - show: receives the study with the parts that are known so far.

    UserError for a model whose layers have no experts, or that has no row.
    """
    check_numbers(new=new_tokens, rounds=rounds or None, threads=threads or None)
    sizes, source = parse_batches(batches), resolve(model, any_architecture=True)
    config, spec = _mixture_of(source, model)
    check_output_folder(output)
    threads, follow = threads or team_size(), progress or unheard
    torch.set_num_threads(threads)
    follow(0, 100, "loading")
    engine = _engine(source, dtype, skew)
    mixtures = [layer.mlp for layer in engine.weights.layers if isinstance(layer.mlp, MixtureMlp)]
    case = {"model": model, "origin": source.origin, "dtype": dtype, "threads": threads, "skew": skew}
    known: dict[str, Any] = {
        "of": StudiedMixture(**case, prompt_tokens=prompt_tokens, new_tokens=new_tokens),
        "environment": read_environment(threads),
        "experts": spec.count,
        "of_a_row": spec.chosen,
        "expert_bytes": _expert_bytes(mixtures[0]),
        "routed_rows": ROUTED,
    }
    follow(15, 100, "the experts of a text")
    known |= _choices(engine, config, prompt_tokens, new_tokens)
    show(so_far(ExpertsStudy, **known))
    known["reads"] = tuple(
        _reads(engine, config, batch, part_of(follow, 20 + 20 * done / len(sizes), 40, 100))
        for done, batch in enumerate(sizes)
    )
    show(so_far(ExpertsStudy, **known))
    schedule = Schedule(rounds=rounds or None, budget_s=None if rounds else BUDGET_S)
    known["sparse"] = sparse_and_dense(mixtures, config, threads, schedule, part_of(follow, 40, 70, 100))
    show(so_far(ExpertsStudy, **known))
    known["routing"] = routing(config, threads, schedule, part_of(follow, 70, 100, 100))
    study = ExpertsStudy(**known)
    save_or_warn(study, output, save_study)
    follow(100, 100, "done")
    return study


def _mixture_of(source: ModelSource, model: str) -> tuple[ModelConfig, ExpertsSpec]:
    """The config of the model and of its experts. UserError for a model that has none, or no row."""
    policy = known_policy(source.hf_config)
    config = None if policy is None else policy.model_config(source.hf_config)
    if config is None or config.experts is None:
        raise UserError(f"got {model}, expected a model with a row whose layers have experts, such as moe-shape")
    return config, config.experts


def _engine(source: ModelSource, dtype: str, skew: float) -> DecoderEngine:
    if skew:
        source = replace(source, weights=SkewedRouter(source.weights, skew))
    engine = init_inference(source, dtype=FLOAT_DTYPES[dtype], impl="cpp")
    assert isinstance(engine, DecoderEngine)
    return engine


def parse_batches(text: str) -> tuple[int, ...]:
    """The sizes in "1,2,4", in increasing order. UserError for anything else."""
    return listed_counts("batches", text, "batch sizes, such as '1,2,4,8'")


def _prompt(config: ModelConfig, batch: int, tokens: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))


def _generate(engine: DecoderEngine, ids: Tensor, new: int) -> None:
    """Draws the new tokens, the same ones each time. A model with random weights would repeat its likeliest token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **arguments)


def _choices(engine: DecoderEngine, config: ModelConfig, prompt: int, new: int) -> dict[str, Any]:
    """The counts of a text by layer and expert, and the experts of each new token."""
    assert config.experts is not None
    with engine.noting_experts() as passes:
        _generate(engine, _prompt(config, 1, prompt), new)
    rows = torch.cat(passes, dim=1)  # [layers, rows, experts of a row]
    counts = [layer.flatten().bincount(minlength=config.experts.count).tolist() for layer in rows]
    return {"counts": counts, "chosen": rows[:, prompt:].tolist()}


def _reads(engine: DecoderEngine, config: ModelConfig, batch: int, follow: Progress) -> ReadByBatch:
    """What some decode steps of a batch read. Every sequence begins with other tokens."""
    follow(0, 1, f"batch {batch}")
    ids = _prompt(config, batch, 4)
    _generate(engine, ids, STEPS + 1)
    engine.stage_times(reset=True)
    _generate(engine, ids, STEPS + 1)
    (read,) = (read for read in engine.experts_read() if read.phase is Phase.DECODE)
    times = [time for time in engine.stage_times(reset=True) if time.phase is Phase.DECODE]
    of_experts = sum(time.total_ms for time in times if time.stage is Stage.EXPERTS)
    return ReadByBatch(
        batch=batch,
        by_layer=read.by_layer,
        experts_ms=of_experts / read.calls,
        step_ms=sum(time.total_ms for time in times) / read.calls,
    )


def _expert_bytes(mixture: MixtureMlp) -> int:
    tensors = [tensor for stack in (mixture.ups, mixture.outs) for tensor in (stack.weight, stack.scales)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) // len(mixture.own)
