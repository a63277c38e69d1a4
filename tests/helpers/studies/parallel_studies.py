"""A study of tensor parallelism with known figures: ranks that wait, and a capture of two of them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from helpers.studies.comparisons import comparison
from helpers.traces.handmade import Recorder

from labkit.engine import StageTime
from labkit.harness.comparison import Comparison
from labkit.harness.records import Measurement
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS
from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.capture.result import Capture
from labkit.nsys.trace import Trace
from labkit.stages import Phase, Stage
from labkit.studies.parallel import ParallelStudy

GAINS = {2: 1.7, 4: 2.5}  # number of ranks -> speedup
WAITS = (0.02, 0.05, 0.01, 0.03)
GB_S = {1: 10.0, 2: 18.0, 4: 30.0}  # memory bandwidth, by number of ranks
ONE_RANK_MS = 12.0  # per token
LATE_US = (0, 7)  # of the captured ranks, at each of their sums


def study() -> ParallelStudy:
    """One rank against two and against four, and a capture of two."""
    sides = {ranks: side(ranks) for ranks in GB_S}
    comparisons = tuple(
        Comparison(baseline=sides[1], candidate=sides[ranks], tokens_equal=True, first_difference=None)
        for ranks in GAINS
    )
    record = CaptureRecord(
        created=datetime(2025, 1, 1, tzinfo=UTC), files=(), command=("x",), window=None, profiler="nsys 1",
        case={"model": "gpt2", "dtype": "float32"}, exit_code=0, seconds=1.0, tax=None, environment=None,
    )  # fmt: skip
    made = ParallelStudy(
        model_config_of(PRESETS["gpt2"].hf_config), comparisons, Capture((Path("x"),), Path("x"), record)
    )
    vars(made)["trace"] = captured(LATE_US)  # in place of the capture's file
    return made


def side(ranks: int) -> Measurement:
    """Measurement of ONE_RANK_MS per token on one rank, and of ONE_RANK_MS / GAINS[ranks] on more."""
    template, gain, gb_s = comparison().candidate, GAINS.get(ranks, 1.0), GB_S[ranks]
    changes = {"decode_ms": (ONE_RANK_MS / gain,) * 3, "bandwidth_gb_s": (gb_s, gb_s)}
    runs = tuple(run.model_copy(update=changes) for run in template.runs)
    case = template.case.model_copy(update={"tp": ranks, "threads": 1})
    stages = tuple(waiting(WAITS[rank]) for rank in range(ranks)) if ranks > 1 else ()
    return template.model_copy(
        update={"name": f"fused-tp{ranks}", "case": case, "runs": runs, "rank_stages": stages},
    )


def waiting(share: float) -> tuple[StageTime, ...]:
    """Stages of a rank that waits for the share `share` of a step."""
    times = {Stage.MLP: 1 - share, Stage.ALL_REDUCE: share}
    return tuple(StageTime(Phase.DECODE, stage, 0, 1, 100 * part) for stage, part in times.items())


def captured(late_us: Sequence[float], steps: int = 3) -> Trace:
    """Trace of ranks that run two layers with two sums each; a rank is `late_us` late at each of its sums."""
    recorder = Recorder()
    for process, late in enumerate(late_us):
        for step in range(steps):
            begin = 400 * step
            recorder.range("decode/step", begin, begin + 390, process=process)
            for index in range(4):
                arrival = begin + 20 + 80 * index
                recorder.range(f"decode/layer.{index // 2}/mlp", arrival - 15, arrival - 5, process=process)
                recorder.range(f"decode/layer.{index // 2}/all_reduce", arrival + late, arrival + 40, process=process)
    return recorder.trace(ranks=range(len(late_us)))
