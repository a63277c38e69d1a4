"""Numbers beyond their bounds are refused in the same words on the command line, by functions and in notebooks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import labkit
from labkit.harness.exchange.measure import measure_exchange
from labkit.harness.methods.bench import bench_methods
from labkit.harness.pipeline.measure import measure_pipeline
from labkit.harness.regions.case import layer_case
from labkit.harness.regions.measure import measure_regions
from labkit.harness.streaming.make import plan_streaming
from labkit.studies.kernels import study_kernels
from labkit.studies.larger_than_memory import study_larger_than_memory
from labkit.studies.parallel import study_parallel
from labkit.studies.pipeline import study_pipeline
from labkit.studies.precision import study_precision
from labkit.studies.traces import capture_pair, capture_ranks
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UserError

MODEL, HUGE, NAN = "tiny-gpt2", 10**30, float("nan")


def resolve_model(model: str, **options: Any) -> object:
    return labkit.resolve(model, **options)


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("threads", 100_000, "got threads = 100000, expected at most "),
        ("rounds", HUGE, "got rounds = 10{30}, expected at most 10,000,000"),
        ("rounds", 10**400, "got rounds = a number of more than 300 digits, expected at most"),
        ("rounds", 2.5, "got rounds = 2.5, expected a whole number"),
        ("rounds", "7", "got rounds = '7', expected a number"),
        ("rounds", True, "got rounds = True, expected a number"),
        ("temperature", NAN, "got temperature = nan, expected a number"),
        *(
            ("temperature", least, "expected at least 1e-06, or 0 for greedy search")
            for least in (-1, 1e-39, 1e-45, 1e-300, 9e-7)
        ),
        ("seed", -1, "got seed = -1, expected at least 0"),
        ("seed", 99999999999999999999999, "got seed = 99999999999999999999999, expected at most "),
        ("memory_gb", 1_000_000_001.5, "got memory_gb = 1000000001.5, expected at most 1,000,000,000"),
        ("budget_s", 0.0, "got budget_s = 0, expected more than 0"),
        ("memory_gb", float("inf"), "got memory_gb = inf, expected at most 1,000,000,000"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused(name: str, number: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_numbers(**{name: number})


def test_numbers_within_their_bounds_pass() -> None:
    check_numbers(temperature=1e-6)
    check_numbers(threads=None, rounds=np.int64(3), seed=0, temperature=0.0, memory_gb=0.5, resident_gb=0)
    with pytest.raises(UserError, match=r"got new = 1, expected at least 2 \(a step follows\)"):
        check_number("new", 1, least=2, why="a step follows")


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (labkit.compare, {"threads": 100_000}, "got threads = 100000, expected at most"),
        (labkit.compare, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (labkit.compare, {"batch": 1.5}, "got batch = 1.5, expected a whole number"),
        (labkit.compare, {"seed": -1}, "got seed = -1, expected at least 0"),
        (labkit.compare, {"budget_s": 1e30}, r"got budget_s = 1e\+30, expected at most"),
        (labkit.evaluate, {"tokens": HUGE}, "got tokens = 10{30}, expected at most"),
        (labkit.evaluate, {"threads": 100_000}, "got threads = 100000, expected at most"),
        (labkit.evaluate, {"seed": -1}, "got seed = -1, expected at least 0"),
        (
            bench_methods,
            {"output": "x.jsonl", "rounds": HUGE},
            "got rounds = 10{30}, expected at most",
        ),
        (bench_methods, {"output": "x.jsonl", "batches": (HUGE,)}, "got batch = 10{30}, expected at most"),
        (layer_case, {"impl": "cpp", "threads": 100_000}, "got threads = 100000, expected at most"),
        (measure_regions, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (measure_pipeline, {"rounds": 0}, "got rounds = 0, expected at least 1"),
        (plan_streaming, {"memory_gb": NAN}, "got memory_gb = nan, expected a number"),
        (study_kernels, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (study_larger_than_memory, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (study_parallel, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (study_pipeline, {"rounds": HUGE}, "got rounds = 10{30}, expected at most"),
        (study_precision, {"tokens": HUGE}, "got tokens = 10{30}, expected at most"),
        (capture_pair, {"threads": 100_000}, "got threads = 100000, expected at most"),
        (capture_ranks, {"ranks": HUGE}, "got ranks = 10{30}, expected at most"),
        (resolve_model, {"seed": -1}, "got seed = -1, expected at least 0"),
    ],
)
def test_functions_refuse_such_numbers_before_they_measure(
    function: Callable[..., Any],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        function(model=MODEL, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: labkit.launch(print, tp_size=HUGE), "got tp_size = 10{30}, expected at most 10,000"),
        (lambda: measure_exchange(ranks=HUGE), "got ranks = 10{30}, expected at most"),
        (lambda: labkit.measure_latency(None, None, "", {}, runs=HUGE), "got runs = 10{30}, expected at most"),  # type: ignore[arg-type]
        (lambda: labkit.init_inference(None, tensor_parallel={"tp_size": HUGE}), "tp_size: got .*, expected at most"),
        (lambda: labkit.init_inference(None, offload={"slots": HUGE}), "slots: got .*, expected at most"),
    ],
)
def test_what_needs_no_model_refuses_them_too(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
