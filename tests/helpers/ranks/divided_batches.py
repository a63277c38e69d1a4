"""What each rank of a pipeline computes in the tests that regroup rows into other micro-batches during generation."""

from itertools import cycle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.ranks.pipelined_models import piped, whole

from labkit.engine.memory.regroup import regroup_rows
from labkit.engine.runners.pipeline.runner import PipelineRunner


def in_time(several_ms: float, one_ms: float) -> Any:
    """Context in which the last stage measures these lap times, with several micro-batches and with one."""
    return mock.patch.object(PipelineRunner, "_of_rank_0", side_effect=cycle((several_ms, one_ms)))


def divided_anew() -> dict[str, Any]:
    """Whether the tokens match a single process when texts end one after the other.

    The micro-batches are tried and regrouped during generation. Also returns the numbers of micro-batches of the prompt
    and of the last token, how often rows were regrouped, and which number was chosen.
    """
    side = "leader" if dist.get_rank() else "server"
    single_process, ends = whole("llama"), list(range(1, 16))
    ids = torch.randint(16, 131, (8, 9), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[5, :2], mask[6, 3] = 0, 0, 0
    arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 60}
    results: dict[str, Any] = {}
    for name, count, times in (
        ("one is faster", "auto", (2.0, 1.0)),
        ("several are faster", "auto", (1.0, 2.0)),
        ("four", 4, (1.0, 1.0)),
        ("hybrid", {"prompt": 5, "decode": 3}, (1.0, 1.0)),
    ):
        engine = piped("llama", 2, micro_batches=count)
        for case, eos in (("to the end", None), ("rows end", ends)):
            engine.pipeline.take_spans()
            divide = mock.patch(f"labkit.engine.runners.pipeline.{side}.regroup_rows", wraps=regroup_rows)
            with in_time(*times), divide as divided:
                text = engine.generate(ids, eos_token_id=eos, **arguments)
            equal = torch.equal(text, single_process.generate(ids, eos_token_id=eos, **arguments))
            computed = [span for span in engine.pipeline.take_spans() if span.kind == "compute"]
            latest = max(span.step for span in computed)
            counts = [len({span.micro_batch for span in computed if span.step == step}) for step in (0, latest)]
            results[f"{name}, {case}"] = equal, *counts, divided.call_count
        results[f"{name}, decided"] = [
            (comparison.rows, comparison.chosen) for comparison in engine.pipeline.counts.compared
        ]
    return results
