"""Studies of pipelines with known figures: ideal runs, so that each bubble has the value of its formula."""

from typing import Any

from helpers.studies.comparisons import environment

from labkit.harness.pipeline.records import PipelineCase, PipelineMeasurement, ScheduleRun, StageSpan, WayPoint
from labkit.harness.pipeline.simulate import simulate
from labkit.stages import Phase
from labkit.studies.pipeline import PipelineStudy

STAGES, BATCH, NEW, PROMPT_MS = 2, 8, 6, 20.0
TIMES = {1: 8.0, 2: 4.0, 4: 3.0}  # of a step, by micro-batches; below two rows each it gets no faster
RUNS = (("queue", 2), ("queue", 4), ("barrier", 2), ("barrier", 4), ("naive", 1))
SPEED = {"queue": 250.0, "naive": 140.0, "tensor parallel": 300.0}


def run(schedule: str, parts: int, *, stage_ms: tuple[float, ...] | None = None, new: int = NEW) -> ScheduleRun:
    """An ideal run after a prompt in one piece; every step has a wait before it and a send after it."""
    times = stage_ms or (TIMES[parts],) * STAGES
    prompt = [
        StageSpan(kind="compute", phase=Phase.PREFILL, stage=stage, micro_batch=0, step=0, begin_ms=stage * PROMPT_MS,
                  end_ms=(stage + 1) * PROMPT_MS)
        for stage in range(len(times))
    ]  # fmt: skip
    begin, spans = len(times) * PROMPT_MS, list(prompt)
    for span in simulate(schedule, times, new - 1, parts):
        shifted = {"begin_ms": span.begin_ms + begin, "end_ms": span.end_ms + begin}
        spans.append(span.model_copy(update=shifted))
        spans.append(
            span.model_copy(update={"kind": "wait", "begin_ms": shifted["begin_ms"], "end_ms": shifted["begin_ms"]})
        )
        spans.append(
            span.model_copy(update={"kind": "send", "begin_ms": shifted["end_ms"], "end_ms": shifted["end_ms"] + 0.02})
        )
    return ScheduleRun(
        schedule=schedule, micro_batches=parts, batch=BATCH, stages=len(times), new_tokens=new, prompt_pieces=1,
        wall_ms=max(span.end_ms for span in spans), spans=tuple(spans),
    )  # fmt: skip


SCATTER = (0.99, 1.0, 1.0, 1.0, 1.0, 1.02)  # factor of each round


def study(*, runs: tuple[ScheduleRun, ...] = (), **more: Any) -> PipelineStudy:
    """Study of a model named gpt2; with eight rows tensor parallelism is the fastest."""
    runs = runs or tuple(run(*arguments) for arguments in RUNS)
    fields: dict[str, Any] = {
        "case": PipelineCase(model="gpt2", origin="random weights, seed 0", dtype="float32", stages=STAGES, batch=BATCH,
                             prompt_tokens=16, new_tokens=NEW, threads=1),
        "environment": environment(), "layers": (6, 6), "pinned": True, "others_cores": 0.0, "runs": runs,
        "bubbles": tuple(tuple(item.bubble + off for off in (-0.01, 0, 0, 0, 0, 0.02)) for item in runs),
        "rates": tuple(tuple(item.tokens_per_s * off for off in SCATTER) for item in runs),
        "ways": tuple(
            WayPoint(way=way, batch=batch, tokens_per_s=speed * batch, runs=(speed * batch * 0.9, speed * batch * 1.1))
            for way, speed in SPEED.items() for batch in (2, BATCH)
        ),
    }  # fmt: skip
    return PipelineStudy(PipelineMeasurement(**(fields | more)))
