"""What each rank of a pipeline on GPUs does in the tests. `labkit.launch` calls it and returns plain data.

Without GPUs the kernels are interpreted, and `played_gpus` sends rows as if they were on GPUs.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from helpers.kernels.interpreter import speed_up_interpreter
from helpers.models.engines import shallow
from helpers.ranks.cut_models import prompts
from helpers.ranks.divided_batches import in_time
from helpers.ranks.gloo_links import GlooLinks
from helpers.ranks.pipelined_models import SCHEDULES, said

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.step import StepInput
from labkit.kernels import gpu
from labkit.kernels.mailbox import Ring

NEW = 4
REGROUPED: dict[str, dict[str, Any]] = {"regrouped": {"micro_batches": {"prompt": 3, "decode": 2}}}


class Timed(NamedTuple):
    """How long a step takes with several micro-batches and with one, in a text of `new` tokens.

    rows_end: the first row ends before the choice is made.
    """

    several_ms: float
    one_ms: float
    new: int
    rows_end: bool = False


@contextmanager
def played_gpus() -> Iterator[None]:
    """Context in which pipeline stages send their rows from device to device, with gloo instead of NCCL."""
    speed_up_interpreter()

    def ring(*arguments: Any, **options: Any) -> Ring:
        return Ring(*arguments, **options | {"gpu": gpu.CPU})

    with (
        mock.patch("labkit.engine.parallel.pipeline_stage.Ring", ring),
        mock.patch("labkit.kernels.mailbox.PairLinks", GlooLinks),
    ):
        yield


def piped(name: str, tp_size: int = 1, kv_offload: Any = None, **pipeline: Any) -> Any:
    options: dict[str, Any] = {
        "kv_offload": kv_offload,
        "tensor_parallel": {"tp_size": tp_size},
        "pipeline_parallel": {"pp_size": dist.get_world_size() // tp_size} | pipeline,
    }
    model = shallow(name, options["pipeline_parallel"]["pp_size"])
    if torch.cuda.is_available():
        return labkit.init_inference(model, impl="triton", **options)
    with played_gpus():
        return labkit.init_inference(model, impl="triton", **options)


def alone(name: str, layers: int = 2) -> Any:
    return labkit.init_inference(shallow(name, layers), impl="cpp")


def generated(model: InferenceEngine, **options: Any) -> Any:
    ids, mask = prompts()
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **arguments)


def of_schedules(name: str, schedules: dict[str, dict[str, Any]], tp_size: int = 1) -> dict[str, bool]:
    """Whether the tokens match a single process when texts end at different steps."""
    single_process = alone(name, dist.get_world_size() // tp_size)
    text = generated(single_process)[:, -NEW:]
    ends = [int(text[0, 1]), int(text[1, 2])]
    expected = generated(single_process, eos_token_id=ends)
    return {
        schedule: torch.equal(generated(piped(name, tp_size, **options), eos_token_id=ends), expected)
        for schedule, options in schedules.items()
    }


def other_calls(name: str) -> dict[str, bool]:
    """Whether calls with one batch at a time give equal results: logits, a cache that is reused, sampling."""
    single_process, engine, (ids, mask) = alone(name), piped(name, schedule="naive"), prompts()
    first = [model(ids, attention_mask=mask) for model in (single_process, engine)]
    continued = [
        model(ids[:, :1], past_key_values=out.past_key_values).logits.cpu()
        for model, out in zip((single_process, engine), first, strict=True)
    ]
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    scores = [generated(model, **options).sequences.cpu() for model in (single_process, engine)]
    torch.manual_seed(3 + dist.get_rank())
    sampled = [generated(engine, do_sample=True) for _ in range(2)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sampled)
    return {
        "logits": float((first[0].logits - first[1].logits.cpu())[mask.bool()].abs().max()) < 1e-3,
        "on a cache": float((continued[0] - continued[1]).abs().max()) < 1e-3,
        "scores": torch.equal(*scores),
        "sampled alike": all(torch.equal(*pair) for pair in zip(gathered[0], gathered[-1], strict=True)),
        "sampled anew": not torch.equal(*sampled),
    }


def how_rows_go(engine: Any) -> tuple[int, int]:
    """Number of rows this rank sends from device to device for a text, and number still under way at the end."""
    links = engine.pipeline.ring._ends._links
    rows_before = links.rows_sent
    generated(engine)
    return links.rows_sent - rows_before, len(engine.pipeline.ring._ends._under_way)


def mistakes(engine: InferenceEngine) -> dict[tuple[int, int], str]:
    """Messages on this rank when a step fails on a rank, in calls one after the other."""
    inner, messages = engine.module.runner.inner, {}
    for failing, step in product(range(dist.get_world_size()), (1, 2, 4, 6)):
        steps = count(1)

        def fails(step_input: StepInput, last: int = step, steps: Iterator[int] = steps) -> Any:
            if next(steps) == last:
                raise ValueError(f"step {last} is too much")
            return type(inner)._begin(inner, step_input)

        with mock.patch.object(inner, "_begin", fails) if dist.get_rank() == failing else nullcontext():
            messages[failing, step] = said(lambda: generated(engine))
    return messages


def stages(name: str, tp_size: int = 1) -> dict[str, bool]:
    """Whether tokens are equal when micro-batches become fewer, on any number of stages."""
    torch.set_num_threads(1)
    return of_schedules(name, REGROUPED, tp_size)


def every_way() -> dict[str, dict[str, bool]]:
    torch.set_num_threads(1)
    ways: dict[str, dict[str, Any]] = {schedule: {"schedule": schedule} for schedule in SCHEDULES}
    return {
        "regrouped": of_schedules("bloom", REGROUPED),
        "schedules": of_schedules("llama", ways),
        "other calls": other_calls("llama"),
    }


def played() -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = piped("gpt2", micro_batches=3)
    rows = how_rows_go(engine)
    results = {"rows": rows, "mistakes": mistakes(engine)}
    return results | {"equal": torch.equal(generated(engine), generated(alone("gpt2")))}


def caches_on_host() -> dict[str, Any]:
    """Whether tokens match a single process; rows of a micro-batch of two before and after one of them ended."""
    torch.set_num_threads(1)
    host = {"device": "cpu"}
    ways: dict[str, dict[str, Any]] = {
        "two": {"micro_batches": 2},
        "fewer": {"micro_batches": {"prompt": 3, "decode": 2}},
        "naive": {"schedule": "naive"},
    }
    ways = {name: way | {"kv_offload": host} for name, way in ways.items()}
    tokens, engine = of_schedules("llama", ways), piped("llama", kv_offload=host)
    text, rows = generated(engine)[:, -NEW:], dict[int, list[int]]()
    begin = engine.module.runner.inner._begin

    def begin_and_count(step: StepInput) -> Any:
        rows.setdefault(id(step.cache), []).append(step.cache.batch_size)
        return begin(step)

    leaves = mock.patch("labkit.engine.memory.regroup.cost_of_leaving", return_value=0)
    with leaves, mock.patch.object(engine.module.runner.inner, "_begin", begin_and_count):
        ended = generated(engine, eos_token_id=int(text[0, 1]))
    tokens["leaving"] = torch.equal(ended, generated(alone("llama"), eos_token_id=int(text[0, 1])))
    first, *_ = rows.values()
    return {"tokens": tokens, "rows": [max(first), first[-1]]}


def choosing(cases: dict[str, Timed]) -> dict[str, tuple[bool, int | None]]:
    torch.set_num_threads(1)
    return {name: _choosing(case) for name, case in cases.items()}


def _choosing(timed: Timed) -> tuple[bool, int | None]:
    """Whether tokens match a single process, and how many micro-batches were chosen."""
    single_process = alone("gpt2")
    engine, arguments = piped("gpt2"), {"max_new_tokens": timed.new, "eos_token_id": None}
    expected = generated(single_process, **arguments)
    if timed.rows_end:
        arguments["eos_token_id"] = int(expected[0, 6 - timed.new])
        expected = generated(single_process, **arguments)
    with in_time(timed.several_ms, timed.one_ms):
        equal = torch.equal(generated(engine, **arguments), expected)
    computed = [span for span in engine.pipeline.take_spans() if span.kind == "compute"]
    latest = max(span.step for span in computed)
    chosen = [comparison.chosen for comparison in engine.pipeline.counts.compared]
    last_batches = {span.micro_batch for span in computed if span.step == latest}
    assert not chosen or chosen == [len(last_batches)]
    return equal, chosen[0] if chosen else None


def lost(folder: str) -> None:
    """Kills the last stage while rows are on their way to it."""
    torch.set_num_threads(1)
    engine = piped("gpt2")
    receive = engine.pipeline.ring._ends._links.receive
    received = 0

    def receive_or_die(rows: Any) -> Any:
        nonlocal received
        received += 1
        if received == 3:
            Path(folder, "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(rows)

    with mock.patch.object(engine.pipeline.ring._ends._links, "receive", receive_or_die):
        generated(engine)
