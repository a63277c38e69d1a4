"""The resolution of this machine is measured by an engine against itself, and is the floor of later comparisons."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep

from labkit.harness.compare import interleave
from labkit.harness.compare.interleave import _tells_apart
from labkit.harness.compare.plan import Schedule
from labkit.harness.compare.sampling import Turns
from labkit.harness.comparison import Comparison
from labkit.harness.runs import Run, TokenTurn
from labkit.harness.turns import resolution as module
from labkit.harness.turns.resolution import FEWEST, ResolutionError, measure_resolution
from labkit.statistics import kept_records, kept_resolutions
from labkit.statistics.kept_records import Machine
from labkit.statistics.kept_resolutions import KeptResolution, keep_resolution
from labkit.statistics.resolution import Resolution

EPOCH_S, SCATTER = 3.0, 0.02
SMALL: dict[str, Any] = {"model": "tiny-gpt2", "dtype": "float32", "threads": 1, "prompt": 9, "new": 9}


def run_of_epoch(index: int, step_ms: float) -> Run:
    turns = [
        TokenTurn(pair=pair, place=0, at_s=EPOCH_S * index, first_step_ms=9, step_ms=step_ms, bandwidth_gb_s=None)
        for pair in range(4)
    ]
    return Run.of_epoch(turns, round=index, first_ms=1.0, prompts_ms=[1.0], decode_ms=[step_ms] * 4, new_tokens=9)


def turns(*, epochs: int = 20, placed: bool = True, others: float = 0.0, **fields: Any) -> Turns:
    """Turns of one engine with itself, whose epochs scatter by SCATTER."""
    scatter = np.random.default_rng(3).normal(0, SCATTER, epochs)
    itself = comparison().candidate
    steps = np.exp(scatter), np.ones(epochs)
    sides = [
        itself.model_copy(
            update={
                "runs": tuple(
                    run_of_epoch(index, step_ms).model_copy(update={"others_cores": others})
                    for index, step_ms in enumerate(steps_ms)
                ),
                "placed_anew": placed,
            }
        )
        for steps_ms in steps
    ]
    return Turns(tuple(sides), ([[[1]]], [[[1]]]), **fields)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the measurement, which is replaced by `result`."""
    asked: dict[str, Any] = {"result": turns()}

    def take_turns(sides: Any, case: Any, schedule: Any, **options: Any) -> Turns:
        asked.update(sides=sides, case=case, schedule=schedule, decided=options["decided"])
        return asked["result"]  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "take_turns", take_turns)
    return asked


def test_the_scatter_and_the_duration_of_epochs_are_kept(made_up: dict[str, Any]) -> None:
    measured = measure_resolution(threads=2)
    assert measured.scatter == pytest.approx(SCATTER, rel=0.4)
    assert measured.epoch_s == pytest.approx(EPOCH_S)
    assert (measured.epochs, measured.threads, measured.machine) == (20, 2, Machine.here())
    assert measured.weight_mb == 498
    baseline, candidate = made_up["sides"]
    assert baseline == candidate
    assert (made_up["case"].model, made_up["case"].dtype) == ("gpt2", "bfloat16")
    assert made_up["schedule"] == Schedule(rounds=FEWEST, budget_s=60.0, stages=False)
    assert not made_up["decided"](made_up["result"])  # no early end


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (turns(placed=False), "the weights stayed in one place.*needs Linux"),
        (turns(others=1.5), r"other programs used 1\.5 of the processors; close them"),
    ],
)
def test_a_measurement_that_says_nothing_is_refused(made_up: dict[str, Any], result: Turns, message: str) -> None:
    made_up["result"] = result
    with pytest.raises(ResolutionError, match=message):
        measure_resolution(threads=2)


def test_a_busy_machine_is_named_at_the_first_look(made_up: dict[str, Any]) -> None:
    measure_resolution(threads=2)
    with pytest.raises(ResolutionError, match=r"other programs used 1\.5 of the processors"):
        made_up["decided"](turns(others=1.5))


def test_an_interrupted_measurement_is_no_result(made_up: dict[str, Any]) -> None:
    made_up["result"] = turns(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        measure_resolution()


@pytest.mark.usefixtures("made_up")
def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"budget_s": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match=f"got {next(iter(wrong))} = 0"):
            measure_resolution(**wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "comparison_device", lambda: torch.device("cuda"))
    with pytest.raises(ValueError, match="got the device cuda, expected a CPU"):
        measure_resolution()


def sides(*sizes_mb: float | None) -> Any:
    return [SimpleNamespace(weight_mb=size, spec=SimpleNamespace(cores=2)) for size in sizes_mb]


def test_a_comparison_takes_the_larger_figure_of_its_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {(249.0, 2): Resolution(0.02, 0.0, EPOCH_S), (498.0, 2): Resolution(0.01, 0.0, EPOCH_S)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interleave, "resolution_for", lambda size, threads: known.get((size, threads)))
    larger, smaller = (known[size, 2].after(60.0) for size in (249.0, 498.0))
    schedule = Schedule(budget_s=10.0)
    assert _tells_apart(sides(498.0, 249.0), schedule) == larger
    assert _tells_apart(sides(498.0, None), schedule) == _tells_apart(sides(498.0, 7.0), schedule) == smaller
    assert _tells_apart(sides(None, 7.0), schedule) is None
    assert _tells_apart(sides(249.0), Schedule(budget_s=600.0)) == known[249.0, 2].after(600.0)
    assert _tells_apart(sides(249.0), Schedule(rounds=5)) == larger
    monkeypatch.setattr(interleave, "comparison_device", lambda: torch.device("cuda"))
    assert _tells_apart(sides(498.0, 249.0), schedule) is None


@sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="sides run on the GPU, where weights stay in their place")
def test_this_machine_is_measured_and_its_comparisons_know_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Comparison] = []
    resolution_of_comparison = module._resolution

    def note_and_go_on(record: Comparison) -> KeptResolution:
        seen.append(record)
        return resolution_of_comparison(record)

    monkeypatch.setattr(module, "_resolution", note_and_go_on)
    monkeypatch.setattr(kept_records, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(module, "busy", lambda taken_cores: False)  # other tests run beside this one
    monkeypatch.setattr(module, "FEWEST", 3)
    earlier = KeptResolution(
        machine=Machine.here(), threads=1, model="tiny-gpt2", dtype="float32", weight_mb=1.0, scatter=0.5, bias=0.0,
        epoch_s=1.0, epochs=20, measured=date(2026, 11, 27),
    )  # fmt: skip
    keep_resolution(earlier)
    measured = measure_resolution(**SMALL, budget_s=0.1)
    (record,) = seen
    assert record.tells_apart == earlier.tells_apart
    assert record.rule.noise == earlier.tells_apart.difference > 0.1
    assert measured.epochs == 3
    assert measured.epoch_s > 0
    assert measured.serves(earlier.weight_mb, threads=1)
    keep_resolution(measured)
    assert kept_resolutions.kept_resolutions() == [measured]
