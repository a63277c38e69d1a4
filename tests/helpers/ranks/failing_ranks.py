"""Messages on each rank when one rank fails in a collective call. `labkit.launch` calls these functions."""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.models.engines import shallow
from helpers.ranks.cut_models import prompts
from helpers.ranks.pipelined_gpus import played_gpus
from helpers.ranks.pipelined_models import greedy

import labkit
from labkit.kernels.build import BuildError
from labkit.system.errors import UserError

MOST_SECONDS = 20  # of a call in which a rank fails; ranks that wait for a lost message wait for minutes
KINDS: dict[str, dict[str, Any]] = {
    "shared memory": {"impl": "cpp"},
    "gloo": {"impl": "cpp", "apart": True},
    "reference": {"impl": "reference", "compiler": False},
}
REASONS = {
    "argument": "ValueError: ",
    "prompt": "TooMuchError: a prompt of two lines",
    "step": "TooMuchError: a step",
    "Ctrl-C": "KeyboardInterrupt",
    "end": "TooMuchError: the end",
    "forward": "TooMuchError: a step",
    "load": "MemoryError",
    "option": "UserError: ",
    "source": "OSError: a file of this rank alone",
    "cache": "UserError: kv_offload: ",
    "checkpoint": "TooMuchError: no place",
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "gpus": {"impl": "triton", "played": True},
    "gpus by gloo": {"impl": "triton", "played": True, "apart": True},
}

NEW = 6  # tokens; ranks fail in a step, after a few others, and at the end
CIRCUMSTANCES = {"played": False, "apart": False, "compiler": True}


class TooMuchError(Exception):
    pass


def model_of(pp_size: int) -> Any:
    """A model with a layer for each stage, or two. Its size does not matter: what fails is not its arithmetic."""
    return shallow("llama", max(2, pp_size))


def generated(engine: Any) -> Any:
    return greedy(engine, max_new_tokens=NEW)


def told(pp_size: int, tp_size: int, kinds: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Messages on this rank, by kind of ranks, and by way to fail and failing rank.

    For each kind also the message when ranks make different calls, and whether the tokens afterwards match a single
    process.
    """
    torch.set_num_threads(1)
    expected, messages = generated(labkit.init_inference(model_of(pp_size), impl="cpp")), {}
    for kind in kinds:
        options = dict((KINDS | ON_GPUS)[kind])
        own_system = mock.patch("labkit.kernels.shared_memory.system", return_value=(str(dist.get_rank()),))
        played, apart, compiler = (options.pop(name, default) for name, default in CIRCUMSTANCES.items())
        no_compiler = mock.patch("labkit.kernels.build.in_use", side_effect=BuildError("there is no compiler"))
        with (
            own_system if apart else nullcontext(),
            played_gpus() if played else nullcontext(),
            nullcontext() if compiler else no_compiler,
        ):
            engines = Made(pp_size, tp_size, options)
            messages[kind] = {
                f"{way} on {failing_rank}": _message(call)
                for failing_rank in range(dist.get_world_size())
                for way, call in ways(engines, fails=failing_rank == dist.get_rank()).items()
            }
            messages[kind]["calls"] = _message(partial(generated if dist.get_rank() else forward, engines.engine))
            messages[kind]["afterwards"] = str(torch.equal(generated(engines.engine), expected))
    return messages


def check_told(ranks: Sequence[dict[str, dict[str, str]]]) -> None:
    """Fails unless each rank was `told` the right messages."""
    for rank, by_kind in enumerate(ranks):
        for kind, messages in by_kind.items():
            assert messages.pop("afterwards") == "True", kind
            assert re.search(
                "RanksDifferError: the ranks make different calls: forward, .*generate", messages.pop("calls")
            )
            for case, message in messages.items():
                way, _, failing_rank = case.partition(" on ")
                failed_here = rank == int(failing_rank)
                expected = REASONS[way] if failed_here else f"RankFailedError: rank {failing_rank}: {REASONS[way]}"
                assert message.replace("\n", " ").startswith(expected), f"{kind}, {case}, on rank {rank}: {message}"
            assert len(messages) == len(REASONS) * len(ranks), kind


class Made:
    """An engine over the ranks, with the options that made it."""

    def __init__(self, pp_size: int, tp_size: int, options: dict[str, Any]) -> None:
        self.options: dict[str, Any] = options | {
            "dtype": torch.float32,
            "tensor_parallel": {"tp_size": tp_size},
            "pipeline_parallel": {"pp_size": pp_size},
        }
        self.engine = self.again()

    def again(self, **options: Any) -> Any:
        return labkit.init_inference(model_of(self.options["pipeline_parallel"]["pp_size"]), **self.options | options)


def forward(engine: Any) -> Any:
    return engine(prompts()[0])


def ways(engines: Made, fails: bool) -> dict[str, Callable[[], object]]:
    """Collective calls by name. In each, this rank fails if `fails` is true."""
    engine, ids = engines.engine, prompts()[0]
    runner = engine.module.runner
    steps = runner.inner if engines.options["pipeline_parallel"]["pp_size"] > 1 else runner

    def generating(owner: object, method: str, error: BaseException, after: int = 0) -> Callable[[], object]:
        def call() -> object:
            with _failing(owner, method, error, after) if fails else nullcontext():
                return generated(engine)

        return call

    def one_step() -> object:
        with _failing(steps, "_begin", TooMuchError("a step"), 0) if fails else nullcontext():
            return forward(engine)

    def building(function: str, error: Exception) -> Callable[[], object]:
        def call() -> object:
            with mock.patch(f"labkit.engine.{function}", side_effect=error) if fails else nullcontext():
                return engines.again()

        return call

    def cache() -> object:
        """KV cache on the disk, in a folder to which one rank cannot write."""
        if engines.options["impl"] != "cpp":
            return building("build._begun_save", UserError("kv_offload: is for other kernels"))()
        full = mock.patch("labkit.engine.offload.cache_folder.tempfile.TemporaryFile", side_effect=OSError("full"))
        with full if fails else nullcontext():
            return engines.again(kv_offload={"path": tempfile.gettempdir()})

    return {
        "option": lambda: engines.again(kv_dtype="of no kind" if fails else None),
        "source": building("resolve.chosen_impl", OSError("a file of this rank alone")),
        "cache": cache,
        "checkpoint": building("build._begun_save", TooMuchError("no place")),
        "argument": lambda: engine.generate(ids, max_new_tokens=-1 if fails else NEW),
        "prompt": generating(steps, "_begin", TooMuchError("a prompt\nof two lines")),
        "step": generating(steps, "_begin", TooMuchError("a step"), after=4),
        "Ctrl-C": generating(steps, "_begin", KeyboardInterrupt(), after=3),
        "end": generating(runner, "after_generation", TooMuchError("the end")),
        "forward": one_step,
        "load": building("build.build_weights", MemoryError()),
    }


@contextmanager
def _failing(owner: Any, method: str, error: BaseException, after: int) -> Iterator[None]:
    """Context in which the method raises `error` after the first `after` calls."""
    calls, original = iter(range(after)), getattr(owner, method)

    def call(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return original(*arguments)

    with mock.patch.object(owner, method, call):
        yield


def _message(call: Callable[[], object]) -> str:
    """The error of a call. It begins with the seconds that the call took, if a rank had to wait for others."""
    begun = perf_counter()
    try:
        call()
    except (ValueError, RuntimeError, OSError, MemoryError, TooMuchError, KeyboardInterrupt) as error:
        waited = perf_counter() - begun
        return f"{f'after {waited:.0f} s: ' if waited > MOST_SECONDS else ''}{type(error).__name__}: {error}"
    return "nothing"
