"""Ranks that are lost during a step that computes full logits, and the messages of the remaining ranks.

As a script: `lost_ranks.py MODEL WAY MEETINGS` kills one of two ranks at each of the first meetings, and prints a line
of JSON for each.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_uint64, c_void_p, cast
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from helpers.models.small_models import small_model

import labkit
from labkit.kernels.all_reduce import Exchange
from labkit.kernels.all_reduce.exchange import BRING
from labkit.kernels.other_ranks import LINE
from labkit.launcher.group import ensure_process_group

# In a step: after the embedding, one or two in each layer, for the logits. The mixture has its experts on the disk.
MEETINGS = {"gptj": 5, "gpt2": 8, "mixtral": 8}
BEFORE = 2  # in a call, before its first step: for its name and its tokens
IDS = torch.arange(1, 10)[None]
GENERATE: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0}
WAYS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda engine: engine(IDS),
    "sampling": lambda engine: engine.generate(IDS, do_sample=True, top_k=0, **GENERATE),
    "beams": lambda engine: engine.generate(IDS, num_beams=2, do_sample=False, **GENERATE),
}
REASON = "out of luck"
ROOM_GB = 0.002  # for five of the nine or six experts of each rank


def engine_of_two(name: str, folder: str) -> Any:
    options: dict[str, Any] = {"impl": "cpp", "dtype": torch.float32, "tensor_parallel": {"tp_size": 2}}
    if name != "mixtral":
        return labkit.init_inference(small_model(name), **options)
    # Each rank has memory for some of its experts, and reads the others by need.
    offload = {"path": folder, "resident_gb": ROOM_GB}
    wide = small_model(name, intermediate_size=320)
    engine: Any = labkit.init_inference(wide, ep_size=2, offload=offload, **options)
    assert engine.expert_store.slots < engine.expert_store.layers * engine.expert_store.per_layer
    return engine


def exchange_of(engine: Any) -> Exchange:
    exchange: Exchange = engine.module.runner.layer_range.ranks.exchange
    assert exchange.transport == "shared memory"
    return exchange


@contextmanager
def lost_at(exchange: Exchange, meeting: int, lose: Callable[[], None]) -> Iterator[None]:
    """Context in which this rank meets the others from Python, and runs `lose` instead of meeting number `meeting`."""
    c_exchange, earlier = exchange.c, iter(range(meeting))
    arrivals, bring = c_exchange.arrivals, c_exchange.bring
    assert arrivals is not None
    rounds = [c_uint64.from_address(arrivals + LINE * rank) for rank in range(exchange.size)]

    def meet(turn: int, count: int) -> int:
        if next(earlier, None) is None:
            lose()
            return 1
        rounds[exchange.rank].value = c_exchange.round
        while any(line.value < c_exchange.round for line in rounds):
            os.sched_yield()
        return 0

    callback = BRING(meet)
    c_exchange.arrivals, c_exchange.bring = None, cast(callback, c_void_p)
    try:
        yield
    finally:
        c_exchange.arrivals, c_exchange.bring = arrivals, bring


def said(call: Callable[[Any], object], engine: Any) -> str:
    try:
        call(engine)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failed_in_steps(folder: str) -> dict[str, str]:
    """Messages on this rank when rank 1 fails at each meeting of a step, and at the beginning of each step."""
    messages, fails = {}, dist.get_rank() == 1
    for name, meetings in MEETINGS.items():
        engine = engine_of_two(name, folder)
        exchange = exchange_of(engine)

        def fail(exchange: Exchange = exchange) -> None:
            exchange.error = RuntimeError(REASON)

        for meeting in range(meetings):
            with lost_at(exchange, BEFORE + meeting, fail) if fails else nullcontext():
                messages[f"{name}, meeting {meeting}"] = said(WAYS["forward"], engine)
        for step in range(3):
            for way in ("sampling", "beams"):
                with _raising(engine.module.runner, step) if fails else nullcontext():
                    messages[f"{name}, {way}, step {step}"] = said(WAYS[way], engine)
    return messages


@contextmanager
def _raising(runner: Any, step: int) -> Iterator[None]:
    steps, begin = iter(range(step)), runner._begin

    def begin_or_raise(step_input: Any) -> Any:
        if next(steps, None) is None:
            raise RuntimeError(REASON)
        return begin(step_input)

    with mock.patch.object(runner, "_begin", begin_or_raise):
        yield


def outcome_of_kill(name: str, way: str, meeting: int, victim: int) -> dict[str, Any]:
    """Forks two ranks and kills the victim at a meeting of its call; returns how both ended."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(rank, Path(folder), name, way, meeting if rank == victim else None) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        message = Path(folder, str(1 - victim))
        return {
            "model": name,
            "way": way,
            "meeting": meeting,
            "victim": victim,
            "victim's code": codes[victim],
            "survivor's code": codes[1 - victim],
            "survivor said": message.read_text() if message.exists() else None,
        }


def _forked(rank: int, folder: Path, name: str, way: str, meeting: int | None) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _run_rank(rank, folder, name, way, meeting)
        finally:
            os._exit(1)
    return pid


def _run_rank(rank: int, folder: Path, name: str, way: str, meeting: int | None) -> NoReturn:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    ensure_process_group("cpu", tp_size=2, init_method=f"file://{folder}/store")
    engine = engine_of_two(name, f"{folder}/offloaded")
    losing: AbstractContextManager[None] = nullcontext()
    if meeting is not None:
        losing = lost_at(exchange_of(engine), meeting, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with losing:
        Path(folder, str(rank)).write_text(said(WAYS[way], engine))
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork has no other threads
    labkit.init_inference(small_model(sys.argv[1]), impl="cpp", dtype=torch.float32)  # builds the kernels once
    for number in range(int(sys.argv[3])):
        for victim in range(2):
            sys.stdout.write(json.dumps(outcome_of_kill(sys.argv[1], sys.argv[2], number, victim)) + "\n")
