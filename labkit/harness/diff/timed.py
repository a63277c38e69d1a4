"""Timings of records of all kinds in one form: a side of a case, and one figure for each of its rounds."""

from __future__ import annotations

from dataclasses import dataclass
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
from labkit.statistics import ShareOfLimit, taken_cores

CaseWords = tuple[tuple[str, str], ...]  # fields, each with its value in words
DEFAULT_METRIC = "per_token"
TORCH_ALONE = {side + way for side in (UNFUSED, SDPA) for way in ("", GRAPH)}


@dataclass(frozen=True)
class TimedSide:
    """One side of a case. Unknown fields are None or empty."""

    case: CaseWords  # fields that distinguish the case from others, in words
    name: str
    unit: str
    rounds: tuple[float, ...]  # or epochs, each with its median
    created: datetime
    environment: Environment
    foreign: str = ""  # owner and version of code that is not labkit's; empty: labkit's code
    taken_cores: tuple[float, ...] = ()
    share: ShareOfLimit | None = None
    bandwidth_gb_s: float | None = None  # read bandwidth around the rounds

    @property
    def words(self) -> CaseWords:
        """Fields of the case and the side's name, which together are unique."""
        return (*self.case, ("side", self.name))

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
    return [
        _measurement_side(side, f"{side.name}, as {role}" if same_name else side.name, metric, alone=False)
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
        bandwidth_gb_s=None if metric == "ttft" else side.read_bandwidth_gb_s,
    )


def _layer_sides(record: LayerRecord) -> list[TimedSide]:
    case, environment = record.case, record.environment
    needed = case.threads if environment.gpu is None else 1
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
            taken_cores=tuple(
                taken_cores(others_cores, needed=needed, cores=environment.cores)
                for others_cores in record.others_cores or ()
            ),
            bandwidth_gb_s=record.read_bandwidth_gb_s,
        )
        for name in record.rounds_us
    ]


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
