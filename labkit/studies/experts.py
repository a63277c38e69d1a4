"""The study of a mixture of experts: what rows choose, what steps read, and what the choice costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch

from labkit.engine.engine import DecoderEngine
from labkit.engine.team_size import team_size
from labkit.harness.compare.plan import Schedule
from labkit.harness.environment import read_environment
from labkit.harness.results import save_or_warn
from labkit.kernels.decode_step import MixtureMlp
from labkit.models.config import ExpertsSpec, ModelConfig
from labkit.models.policies import known_policy
from labkit.models.shards import shard
from labkit.studies.expert_pairs import ROUTED, routing, sparse_and_dense
from labkit.studies.expert_runs import draw_text, prompt_of, skewed_engine, steps_of
from labkit.studies.experts_on_disk import InMemory, experts_on_disk, parse_percentages
from labkit.studies.experts_on_ranks import experts_on_ranks
from labkit.studies.experts_study import ExpertsStudy, ReadByBatch, StudiedMixture, save_study
from labkit.studies.settings import Epochs, FloatDtype, Model, NewTokens, PromptTokens, StudySetting, Threads
from labkit.system.bounds import check_numbers
from labkit.system.comma_list import listed_counts
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, part_of, unheard
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

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
    ranks: Annotated[
        int, StudySetting("processes of one thread that divide the experts; 1: leaves them out", (1, 16))
    ] = 2,
    in_memory: InMemory = "25,50,75",
    rounds: Epochs = 0,
    threads: Threads = 0,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> ExpertsStudy:
    """Notes the experts of every token of a text; counts what steps of several batches read; measures, in turns, the
    experts of one row against a dense MLP of the same bytes, and a table against one-hot products; divides the experts
    among ranks; and reads experts from the disk that memory does not hold.

    - rounds: number of epochs; 0: until there is a verdict, or BUDGET_S seconds are spent for a pair.
    - output: folder for the record, which `load_study` reads.
    - progress, show: receive the progress, and the study with the parts that are known so far.

    UserError for a model whose layers have no experts, or that has no row, and for ranks that cannot divide it.
    """
    check_numbers(new=new_tokens, rounds=rounds or None, threads=threads or None)
    sizes, percentages = parse_batches(batches), parse_percentages(in_memory)
    source = resolve(model, any_architecture=True)
    config, spec = _mixture_of(source, model)
    _check_ranks(config, ranks)
    folder = check_output_folder(output)
    threads, follow = threads or team_size(), progress or unheard
    torch.set_num_threads(threads)
    follow(0, 100, "loading")
    engine = skewed_engine(source, dtype, skew)
    mixtures = [layer.mlp for layer in engine.weights.layers if isinstance(layer.mlp, MixtureMlp)]
    case = {"model": model, "dtype": dtype, "threads": threads, "skew": skew}
    of = StudiedMixture(**case, origin=source.origin, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    known = _sizes(of, spec, mixtures[0])
    schedule = Schedule(rounds=rounds or None, budget_s=None if rounds else BUDGET_S)
    measured: dict[str, Callable[[Progress], object]] = {
        "reads": lambda follow: _reads(engine, config, sizes, follow),
        "sparse": lambda follow: sparse_and_dense(mixtures, config, threads, schedule, follow),
        "routing": lambda follow: routing(config, threads, schedule, follow),
        "ranks": lambda follow: experts_on_ranks(model, dtype, skew, ranks, follow),
        "on_disk": lambda follow: experts_on_disk(source, config, dtype, skew, percentages, folder, follow),
    }
    known |= _choices(engine, config, prompt_tokens, new_tokens)
    for place, (name, measure) in enumerate(measured.items(), start=1):
        if "reads" in known:  # not before: a browser that draws would slow the steps, whose times have no grade
            show(so_far(ExpertsStudy, **known))
        known[name] = measure(part_of(follow, 16 * place, 16 * place + 16, 100))
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


def _sizes(of: StudiedMixture, spec: ExpertsSpec, mixture: MixtureMlp) -> dict[str, Any]:
    """The fields of the record that need no measurement."""
    return {
        "of": of,
        "environment": read_environment(of.threads),
        "experts": spec.count,
        "of_a_row": spec.chosen,
        "expert_bytes": _expert_bytes(mixture),
        "routed_rows": ROUTED,
    }


def _reads(
    engine: DecoderEngine, config: ModelConfig, batches: Sequence[int], follow: Progress
) -> tuple[ReadByBatch, ...]:
    found = []
    for done, batch in enumerate(batches):
        follow(done, len(batches), f"batch {batch}")
        found.append(steps_of(engine, config, batch))
    return tuple(found)


def _check_ranks(config: ModelConfig, ranks: int) -> None:
    try:
        shard(config, ranks, ep_size=ranks)
    except (UserError, UnsupportedError) as error:
        raise UserError(f"got ranks = {ranks}: {error}; set ranks to 1, which leaves them out") from None


def parse_batches(text: str) -> tuple[int, ...]:
    """The sizes in "1,2,4", in increasing order. UserError for anything else."""
    return listed_counts("batches", text, "batch sizes, such as '1,2,4,8'")


def _choices(engine: DecoderEngine, config: ModelConfig, prompt: int, new: int) -> dict[str, Any]:
    """The counts of a text by layer and expert, and the experts of each new token."""
    assert config.experts is not None
    with engine.noting_experts() as passes:
        draw_text(engine, prompt_of(config, 1, prompt), new)
    rows = torch.cat(passes, dim=1)  # [layers, rows, experts of a row]
    counts = [layer.flatten().bincount(minlength=config.experts.count).tolist() for layer in rows]
    return {"counts": counts, "chosen": rows[:, prompt:].tolist()}


def _expert_bytes(mixture: MixtureMlp) -> int:
    tensors = [tensor for stack in (mixture.ups, mixture.outs) for tensor in (stack.weight, stack.scales)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) // len(mixture.own)
