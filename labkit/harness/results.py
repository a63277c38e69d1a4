"""Results on disk: one record per line of JSON, written whole, read back as records or as a frame.

A study of precisions, or of a model larger than memory, is one JSON object with records inside.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from labkit.harness.cold_start_record import ColdStart
from labkit.harness.comparison import Comparison
from labkit.harness.evaluation.records import Evaluation
from labkit.harness.exchange.records import ExchangeMeasurement, HandOverMeasurement
from labkit.harness.frozen_record import SCHEMA_VERSION
from labkit.harness.load_record import LoadMeasurement
from labkit.harness.methods.cell import MethodCell
from labkit.harness.pipeline.records import PipelineMeasurement
from labkit.harness.records import Measurement
from labkit.harness.regions.records import LadderMeasurement, RegionMeasurement
from labkit.harness.self_comparison_record import SelfComparison
from labkit.harness.stream_record import StreamMeasurement
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.waiting_record import WaitingTime
from labkit.system.asked_from import setting
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.input_file import decoded, read_file
from labkit.system.json_file import read_json
from labkit.system.output_folder import reason
from labkit.system.result_table import frame_of
from labkit.system.validation import first_problem
from labkit.system.whole_file import write_whole

if TYPE_CHECKING:
    import pandas as pd

AnyRecord = (
    Measurement
    | Comparison
    | RegionMeasurement
    | LadderMeasurement
    | ExchangeMeasurement
    | HandOverMeasurement
    | LoadMeasurement
    | ColdStart
    | WaitingTime
    | SelfComparison
    | StreamMeasurement
    | Evaluation
    | MethodCell
    | StreamingPlan
    | PipelineMeasurement
)
KINDS = {record.model_fields["kind"].default for record in get_args(AnyRecord)}
OF_PRECISIONS, OF_LARGER = "-precisions.json", "-larger-than-memory.json"  # endings of studies, which hold records
RECORDS = "records as JSON lines (.jsonl)"
RECORD: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])


class SaveError(RunError):
    """A measured result could not be written. The message names the file and what to do."""


def save(record: Measurement | Comparison | Evaluation | StreamingPlan, folder: str | os.PathLike[str]) -> Path:
    """Writes one record as its own file of JSON lines in `folder`, whole or not at all; returns the path.

    SaveError where the folder cannot be written to, or is full.
    """
    return save_lines(expanded(folder) / f"{_stem(record)}.jsonl", [record])


def _stem(record: Measurement | Comparison | Evaluation | StreamingPlan) -> str:
    """Name of a record's file: its time, which sorts the files, and its content."""
    time_format = "%Y%m%dT%H%M%S%f"
    if isinstance(record, Evaluation):
        case = record.case
        return f"{record.created:{time_format}}-{Path(case.model).name}-{case.dtype}-evaluated-against-{case.against}"
    if isinstance(record, StreamingPlan):
        plan = record.case
        return f"{record.created:{time_format}}-{Path(plan.model).name}-{plan.precision}-{plan.memory_gb:g}gb-batches"
    sides = (record.baseline, record.candidate) if isinstance(record, Comparison) else (record,)
    shared, names = sides[0].case, "-vs-".join(side.name for side in sides)
    model = Path(shared.model).name
    return f"{sides[-1].created:{time_format}}-{model}-{shared.dtype}-b{shared.batch}-{names}"


def save_or_warn(
    record: Any, folder: str | os.PathLike[str], save: Callable[[Any, str | os.PathLike[str]], object] = save
) -> None:
    """As `save`, for functions that return the record: a file that cannot be written is only a warning."""
    try:
        save(record, folder)
    except SaveError as error:
        warnings.warn(str(error), stacklevel=3)


def save_lines(target: Path, records: Iterable[BaseModel]) -> Path:
    """Writes records as the lines of the file `target`, whole or not at all; returns it. SaveError as for `save`."""
    try:
        write_whole(target, "".join(record.model_dump_json() + "\n" for record in records))
    except OSError as error:
        raise SaveError(f"the result could not be saved as {target}: {reason(error)} ({setting('output')})") from error
    return target


def load_records(path: str | os.PathLike[str]) -> list[AnyRecord]:
    """The records of a file of JSON lines or of a study, or of all such files in a folder and its subfolders, oldest
    first.

    UserError: nothing at `path`, a folder without such files, a line that is no record, a study without records.
    """
    root = expanded(path)
    if not root.exists():
        raise UserError(f"got {root}, which does not exist; expected a file of JSON lines, or a folder of such files")
    files = _files(root) if root.is_dir() else [root]
    if not files:
        raise UserError(
            f"got the folder {root}, which holds no results; expected files of JSON lines (.jsonl) in it or in its "
            "folders, such as `runs`, which labkit compare writes"
        )
    return [record for file in files for record in _records(file)]


def load_results(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The records under `path` as rows of a frame, each with its case and its machine. The column `kind` says:

    - "run": a timed run of a comparison, a measurement or a method, with its share of the limit
    - "method": a method that could not be measured, with the reason
    - "evaluation": an evaluation of quality

    Other records, such as regions and plans, are left out with a warning.
    """
    records = load_records(path)
    rows = [_rows(record) for record in records]
    without_rows = Counter(record.kind for record, record_rows in zip(records, rows, strict=True) if not record_rows)
    if without_rows:
        kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(without_rows.items()))
        warnings.warn(f"records without rows here are left out: {kinds}; load_records has them", stacklevel=2)
    return frame_of([row for record_rows in rows for row in record_rows])


def _files(folder: Path) -> list[Path]:
    """Files of JSON lines and of studies, sorted by their names, which begin with times. Hidden folders are skipped,
    because they hold unfinished work.
    """
    named = (file for file in folder.rglob("*.json*") if file.name.endswith((".jsonl", OF_PRECISIONS, OF_LARGER)))
    visible = (file for file in named if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(visible, key=lambda file: (file.name, file))


def _records(file: Path) -> Iterator[AnyRecord]:
    if not file.name.endswith((OF_PRECISIONS, OF_LARGER)):
        for number, line in enumerate(decoded(read_file(file, RECORDS), file, RECORDS).splitlines(), 1):
            if line.strip():
                yield _parse(line, f"{file}:{number}")
        return
    inside = list(_inside(read_json(file, "a study that labkit wrote")))
    if not inside:
        raise UserError(f"got {file}, which holds no records; expected a study that labkit wrote")
    for record in inside:
        yield _parse(json.dumps(record), str(file))


def _inside(value: Any) -> Iterator[dict[str, Any]]:
    """The outermost records in plain data: a comparison, but not its sides."""
    if isinstance(value, dict) and value.get("kind") in KINDS:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part)


def _parse(line: str, position: str) -> AnyRecord:
    try:
        return RECORD.validate_json(line)
    except ValidationError as error:
        raise UserError(
            f"{position} is not a result of schema version {SCHEMA_VERSION}: {first_problem(error, 'the line')}; "
            "measure again, or remove the line"
        ) from None


def _rows(record: AnyRecord) -> list[dict[str, Any]]:
    if isinstance(record, Comparison):
        return [*_runs("baseline", record.baseline), *_runs("candidate", record.candidate)]
    if isinstance(record, Measurement):
        return _runs("measurement", record)
    if isinstance(record, MethodCell):
        if record.measured:
            return [row | {"side": record.method} for row in _runs("method", record.measured)]
        return [_head("method", "method", record) | {"side": record.method, "why": record.why}]
    if isinstance(record, Evaluation):
        figures = ("perplexity", "reference_perplexity", "kl", "agreement")
        values = {name: getattr(record, name).value for name in figures if record.trained or "perplexity" not in name}
        return [_head("evaluation", "evaluation", record) | {"impl": record.impl, "weights": record.weights} | values]
    return []


def _head(kind: str, role: str, record: Measurement | MethodCell | Evaluation) -> dict[str, Any]:
    """Columns with which each row begins."""
    environment = record.environment
    return {"kind": kind, "created": record.created, "role": role, "machine": environment.machine} | {
        name: value for name, value in record.case.model_dump().items() if not isinstance(value, dict)
    }


def _runs(role: str, side: Measurement) -> list[dict[str, Any]]:
    return [
        _head("run", role, side)
        | {
            "side": side.name,
            "impl": side.impl,
            "weights": side.weights,
            "round": run.round,
            "ttft_ms": run.ttft_ms if run.has_prompt else None,
            "per_token_ms": run.per_token_ms,
            "end_to_end_ms": run.end_to_end_ms,
            "bandwidth_gb_s": np.mean(run.probes_gb_s) if run.probes_gb_s else None,
            "floor_share": run.floor_share(side.work, side.peak_gflop_s) if side.work else None,
            "others_cores": run.others_cores,
            "peak_rss_mb": side.peak_rss_mb,
        }
        for run in side.runs
    ]
