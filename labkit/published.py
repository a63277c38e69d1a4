"""Published figures, as data with their source. They are shown next to measured figures, never as our own."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import pandas as pd

from labkit.system.errors import UserError

NOT_MEASURED_HERE = "published, not measured here"


@dataclass(frozen=True)
class Pair:
    """Two methods of one published table. The speedup is the baseline's time over the candidate's time."""

    table: str
    metric: str
    unit: str
    baseline: str
    baseline_precision: str
    candidate: str
    candidate_precision: str


PAIRS = (
    Pair("gptj6b-generate-128", "latency_mean", "ms per call", "hf vanilla", "fp16", "ds-inference", "fp16"),
    Pair("gptj6b-pipeline-50", "latency_mean", "ms per call", "hf pipeline", "fp32", "ds-inference pipeline", "fp32"),
    Pair("bloom7b1-8xa6000", "latency_per_token", "ms per token", "accelerate", "fp16", "ds-inference", "fp16"),
    Pair("bloom176b-8xa100", "latency_per_token", "ms per token", "accelerate", "bf16", "ds-inference", "fp16"),
)

SCALED = ("latency_mean", "latency_per_token")


@cache
def _published() -> pd.DataFrame:
    with files("labkit").joinpath("published.csv").open(encoding="utf-8") as stream:
        frame = pd.read_csv(stream, dtype={"gpus": "Int64", "batch": "Int64"})
    return frame.fillna({"note": ""})


def published(table: str | None = None) -> pd.DataFrame:
    """All published figures, or the figures of one `table`.

    One row per figure: table, model, hardware ("not stated" if the source does not say), gpus, method, precision,
    batch, metric, unit, value (missing if it ran out of memory; then `note` says so), note, source, and reference
    (where to find the source).
    """
    frame = _published()
    if table is None:
        return frame.copy()
    if table not in set(frame["table"]):
        raise UserError(f"no published table {table!r}; there are {', '.join(sorted(set(frame['table'])))}")
    return frame[frame["table"] == table].copy()


def published_speedups(batch: int = 1) -> pd.DataFrame:
    """Speedups from the sources' latencies, one row per pair.

    If a table has several batch sizes, the one closest to `batch` is taken.
    """
    return pd.DataFrame([_speedup(pair, batch) for pair in PAIRS])


def published_scaling(batch: int = 1) -> pd.DataFrame:
    """Scaling over GPUs from the sources' latencies: one row per model, method and precision that a source has on
    several numbers of GPUs, with the fewest (few_gpus, few_ms), the most (many_gpus, many_ms) and the speedup.

    If there are several batch sizes, the one closest to `batch` is taken. A source without batch sizes gives no row.
    """
    frame = _published()
    frame = frame[(frame["unit"] == "ms") & frame["metric"].isin(SCALED)].dropna(subset=["value", "batch", "gpus"])
    rows = []
    for _, group in frame.groupby(["model", "hardware", "method", "precision", "metric", "source"], sort=False):
        counts = group.groupby("batch")["gpus"].nunique()
        several = counts.index[counts > 1]
        if several.empty:
            continue
        chosen = min(several, key=lambda size: abs(size - batch))
        ordered = group[group["batch"] == chosen].sort_values("gpus")
        few, many = ordered.iloc[0], ordered.iloc[-1]
        shared = few[["model", "hardware", "method", "precision", "batch", "source"]].to_dict()
        times = {"few_ms": few["value"], "many_ms": many["value"], "speedup": few["value"] / many["value"]}
        rows.append(shared | {"few_gpus": int(few["gpus"]), "many_gpus": int(many["gpus"])} | times)
    return pd.DataFrame(rows)


def _speedup(pair: Pair, batch: int) -> dict[str, object]:
    frame = published(pair.table)
    frame = frame[frame["metric"] == pair.metric]
    slow = frame[(frame["method"] == pair.baseline) & (frame["precision"] == pair.baseline_precision)]
    fast = frame[(frame["method"] == pair.candidate) & (frame["precision"] == pair.candidate_precision)]
    both = slow.merge(fast, on=["model", "hardware", "gpus", "batch", "source"], suffixes=("_baseline", "_candidate"))
    both = both.dropna(subset=["value_baseline", "value_candidate"])
    row = both.loc[(both["batch"] - batch).abs().idxmin()]
    return {
        "model": row["model"],
        "hardware": row["hardware"],
        "gpus": int(row["gpus"]),
        "batch": int(row["batch"]),
        "baseline": f"{pair.baseline} {pair.baseline_precision}",
        "candidate": f"{pair.candidate} {pair.candidate_precision}",
        "baseline_ms": row["value_baseline"],
        "candidate_ms": row["value_candidate"],
        "unit": pair.unit,
        "speedup": row["value_baseline"] / row["value_candidate"],
        "source": row["source"],
    }
