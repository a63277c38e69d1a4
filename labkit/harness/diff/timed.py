"""Timings of records of all kinds in one form: a side of a case, and one figure for each of its rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment
from labkit.harness.exchange.records import GLOO, WAYS, ExchangeMeasurement
from labkit.harness.load_record import LoadMeasurement
from labkit.harness.records import Measurement
from labkit.harness.regions.records import LadderMeasurement, LayerRecord, RegionMeasurement
from labkit.harness.regions.sides import GRAPH, SDPA, UNFUSED
from labkit.harness.results import AnyRecord
from labkit.harness.runs import Run, TokenTurn
from labkit.statistics import ShareOfLimit
from labkit.statistics.two_times import TimedEpoch

CaseWords = tuple[tuple[str, str], ...]  # fields, each with its value in words
DEFAULT_METRIC = "per_token"
TORCH_ALONE = {side + way for side in (UNFUSED, SDPA) for way in ("", GRAPH)}


@dataclass(frozen=True)
class TimedSide:
    """One side of a case. Unknown fields are None or empty."""

    case: CaseWords  # fields that distinguish the case from others, in words
    name: str
    unit: str
    rounds: tuple[float, ...]  # figure of each round or epoch
    created: datetime
    environment: Environment
    foreign: str = ""  # owner and version of code that is not labkit's; empty: labkit's code
    taken_cores: tuple[float, ...] = ()
    share: ShareOfLimit | None = None
    bandwidth_gb_s: float | None = None  # read bandwidth around the rounds; None also where memory is not the limit
    epochs: tuple[TimedEpoch, ...] = ()  # empty: measured in rounds
    placed_anew: bool = False  # whether the weights were put into new memory before each epoch
    tells_apart: float = 0.0  # the smallest difference that this machine tells apart, a fraction; 0: not known

    @property
    def words(self) -> CaseWords:
        """Fields of the case and the side's name, which together are unique."""
        return (*self.case, ("side", self.name))

    @property
    def sample(self) -> str:
        """The word for what `rounds` holds."""
        return "epoch" if self.epochs else "round"

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))


def timed_sides(record: AnyRecord, metric: str = DEFAULT_METRIC) -> list[TimedSide]:
    """The sides of a record. A record of generation has a figure for each metric. A record of calls, sums or loading
    has one figure, under the default metric, and no sides under another. A record that times nothing has no sides.
    """
    if isinstance(record, Comparison):
        return _comparison_sides(record, metric)
    if isinstance(record, Measurement):
        return [_measurement_side(record, record.name, metric)]
    if metric != DEFAULT_METRIC:
        return []
    if isinstance(record, RegionMeasurement | LadderMeasurement):
        return _layer_sides(record)
    if isinstance(record, ExchangeMeasurement):
        return _exchange_sides(record)
    return _loading_sides(record) if isinstance(record, LoadMeasurement) else []


def _comparison_sides(record: Comparison, metric: str) -> list[TimedSide]:
    sides = {"baseline": record.baseline, "candidate": record.candidate}
    same_name = record.baseline.name == record.candidate.name
    known = record.tells_apart.difference if record.tells_apart else 0.0
    names = {role: f"{side.name}, as {role}" if same_name else side.name for role, side in sides.items()}
    return [
        replace(_measurement_side(side, names[role], metric, alone=False), tells_apart=known)
        for role, side in sides.items()
    ]


def _measurement_side(side: Measurement, name: str, metric: str, *, alone: bool = True) -> TimedSide:
    case, packages = side.case, side.environment.packages
    is_labkit = alone or side.name.startswith("fused") or "labkit" in side.impl
    return TimedSide(
        case=(
            ("model", case.model),
            ("dtype", case.dtype),
            ("batch", f"batch {case.batch}"),
            ("tokens", f"{case.prompt_tokens} + {case.new_tokens} tokens"),
            ("threads", _threads(case.threads)),
            *((("ranks", f"{case.tp} ranks"),) if case.tp > 1 else ()),
            *((("stages", f"{case.pp} stages, {case.schedule}"),) if case.pp > 1 else ()),
        ),
        name=name,
        unit="ms",
        rounds=side.rounds_ms(metric),
        created=side.created,
        environment=side.environment,
        foreign="" if is_labkit else f"{side.impl}; torch {packages.get('torch')}",
        taken_cores=side.taken_cores,
        share=side.share_of_limit if metric == DEFAULT_METRIC else None,
        bandwidth_gb_s=None if metric == "ttft" or _multiplies_longer(side) else side.read_bandwidth_gb_s,
        epochs=_epochs(side, metric) if side.in_epochs else (),
        placed_anew=side.placed_anew,
    )


def _epochs(side: Measurement, metric: str) -> tuple[TimedEpoch, ...]:
    """The turns of each epoch, with their rates where memory is the limit. First tokens have no rates."""
    if metric == "ttft":
        return tuple(TimedEpoch(run.prompts_ms) for run in side.runs if run.prompts_ms)
    has_rates = not _multiplies_longer(side) and all(turn.bandwidth_gb_s for run in side.runs for turn in run.turns)
    return tuple(
        TimedEpoch(
            tuple(_turn_ms(side, run, turn, metric) for turn in run.turns),
            tuple(turn.bandwidth_gb_s for turn in run.turns if turn.bandwidth_gb_s) if has_rates else (),
        )
        for run in side.runs
    )


def _turn_ms(side: Measurement, run: Run, turn: TokenTurn, metric: str) -> float:
    """The time of a step of the turn, or of a whole generation with such steps and the epoch's first token."""
    return turn.step_ms if metric == DEFAULT_METRIC else run.ttft_ms + (side.case.new_tokens - 1) * turn.step_ms


def _multiplies_longer(side: Measurement) -> bool:
    """Whether multiplying takes longer than reading at every probed rate, so that memory is not a step's limit."""
    probes = [probe for run in side.runs for probe in run.probes_gb_s]
    if side.work is None or not side.peak_gflop_s or not probes:
        return False
    return side.work.floor_ms(min(probes), side.peak_gflop_s) > side.work.floor_ms(min(probes))


def _layer_sides(record: LayerRecord) -> list[TimedSide]:
    case, environment = record.case, record.environment
    region = record.region if isinstance(record, RegionMeasurement) else "all regions"
    return [
        TimedSide(
            case=(
                ("model", case.model),
                ("dtype", case.dtype),
                ("batch", f"batch {case.batch}"),
                ("context", f"{case.context} tokens in the cache"),
                ("threads", _threads(case.threads)),
                ("impl", case.impl),
                ("region", region),
            ),
            name=name,
            unit="µs",
            rounds=record.samples_us(name),
            created=record.created,
            environment=environment,
            foreign=f"torch {environment.packages.get('torch')}" if name in TORCH_ALONE else "",
            taken_cores=record.taken_cores,
            bandwidth_gb_s=record.read_bandwidth_gb_s,
            epochs=_layer_epochs(record, name),
            placed_anew=record.placed_anew,
        )
        for name in record.rounds_us
    ]


def _layer_epochs(record: LayerRecord, side: str) -> tuple[TimedEpoch, ...]:
    """The rounds of each epoch, with their rates; none where the record has no epochs."""
    if not record.epochs:
        return ()
    times = record.by_epoch(record.rounds_us[side])
    if record.bandwidth_gb_s is None:
        return tuple(TimedEpoch(tuple(took.tolist())) for took in times)
    rates = record.by_epoch(record.bandwidth_gb_s)
    return tuple(
        TimedEpoch(tuple(took.tolist()), tuple(read.tolist())) for took, read in zip(times, rates, strict=True)
    )


def _exchange_sides(record: ExchangeMeasurement) -> list[TimedSide]:
    return [
        TimedSide(
            case=(("what", f"sum of {record.bytes:,} bytes"), ("ranks", f"{record.ranks} ranks")),
            name=WAYS[impl],
            unit="µs",
            rounds=tuple(record.medians_us(impl)),
            created=record.created,
            environment=record.environment,
            foreign=f"torch {record.environment.packages.get('torch')}" if impl == GLOO else "",
        )
        for impl in record.rounds_us
    ]


def _loading_sides(record: LoadMeasurement) -> list[TimedSide]:
    size = f"loading {record.model_bytes / 1e9:.2f} GB"
    return [
        TimedSide(
            case=(("what", size), ("dtype", record.dtype), ("ranks", f"{record.ranks} ranks")),
            name=way,
            unit="s",
            rounds=tuple(record.seconds(way)),
            created=record.created,
            environment=record.environment,
        )
        for way in record.rounds_s
    ]


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
