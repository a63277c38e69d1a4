"""Studies of pipelines with known figures: ideal runs, so that each bubble is what its formula says."""

from typing import Any

from comparisons import environment

from labkit.harness.pipeline.records import PipelineCase, PipelineMeasurement, ScheduleRun, StageSpan, WayPoint
from labkit.harness.pipeline.simulate import simulate
from labkit.stages import Phase
from labkit.studies.pipeline import PipelineStudy

STAGES, BATCH, NEW, PROMPT_MS = 2, 8, 6, 20.0
TIMES = {1: 8.0, 2: 4.0, 4: 3.0}  # of a step by micro-batches: less than two rows each are no quicker
RUNS = (("queue", 2), ("queue", 4), ("barrier", 2), ("barrier", 4), ("naive", 1))
SPEED = {"queue": 250.0, "naive": 140.0, "tensor parallel": 300.0}


def run(schedule: str, parts: int, *, stage_ms: tuple[float, ...] | None = None, new: int = NEW) -> ScheduleRun:
    """An ideal run behind a prompt in one piece, with a send behind every step and a wait before it."""
    times = stage_ms or (TIMES[parts],) * STAGES
    prompt = [
        StageSpan(kind="compute", phase=Phase.PREFILL, stage=stage, micro_batch=0, step=0, begin_ms=stage * PROMPT_MS,
                  end_ms=(stage + 1) * PROMPT_MS)
        for stage in range(len(times))
    ]  # fmt: skip
    begin, found = len(times) * PROMPT_MS, list(prompt)
    for span in simulate(schedule, times, new - 1, parts):
        moved = {"begin_ms": span.begin_ms + begin, "end_ms": span.end_ms + begin}
        found.append(span.model_copy(update=moved))
        found.append(
            span.model_copy(update={"kind": "wait", "begin_ms": moved["begin_ms"], "end_ms": moved["begin_ms"]})
        )
        found.append(
            span.model_copy(update={"kind": "send", "begin_ms": moved["end_ms"], "end_ms": moved["end_ms"] + 0.02})
        )
    return ScheduleRun(
        schedule=schedule, micro_batches=parts, batch=BATCH, stages=len(times), new_tokens=new, prompt_pieces=1,
        wall_ms=max(span.end_ms for span in found), spans=tuple(found),
    )  # fmt: skip


SCATTER = (0.99, 1.0, 1.0, 1.0, 1.0, 1.02)  # of the rounds


def study(*, runs: tuple[ScheduleRun, ...] = (), **more: Any) -> PipelineStudy:
    """Of gpt2's name; with eight rows tensor parallelism is the fastest."""
    runs = runs or tuple(run(*each) for each in RUNS)
    found: dict[str, Any] = {
        "case": PipelineCase(model="gpt2", origin="random weights, seed 0", dtype="float32", stages=STAGES, batch=BATCH,
                             prompt_tokens=16, new_tokens=NEW, threads=1),
        "environment": environment(), "layers": (6, 6), "pinned": True, "others_cores": 0.0, "runs": runs,
        "bubbles": tuple(tuple(each.bubble + off for off in (-0.01, 0, 0, 0, 0, 0.02)) for each in runs),
        "rates": tuple(tuple(each.tokens_per_s * off for off in SCATTER) for each in runs),
        "ways": tuple(
            WayPoint(way=way, batch=batch, tokens_per_s=speed * batch, runs=(speed * batch * 0.9, speed * batch * 1.1))
            for way, speed in SPEED.items() for batch in (2, BATCH)
        ),
    }  # fmt: skip
    return PipelineStudy(PipelineMeasurement(**(found | more)))
