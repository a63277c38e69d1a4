"""The exercise of the notebook on models larger than memory: from which batch size on is streaming free?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.notebooks.verdicts import checked
from labkit.studies.frames import number
from labkit.system.markdown import markdown_table

if TYPE_CHECKING:
    from labkit.studies.larger_than_memory import StreamingStudy

FASTER = 3  # the exercise's disk is this many times as fast as the measured one, so that no figure has the answer
DIGITS = 4  # of the measured rates: answers computed from them are exact enough


def streaming_numbers(study: StreamingStudy) -> Markdown:
    """The numbers from which the exercise starts: the measured rates, the precision, and the tokens of a sequence."""
    plan, case = study.plan, study.plan.case
    rows = {
        "the disk, D": f"{number(plan.rates.disk_gb_s, DIGITS)} GB/s (of 10^9 bytes)",
        "the processor, F": f"{number(plan.rates.gflop_s, DIGITS)} GFLOP/s (multiplications and additions)",
        "precision of the weights": case.precision,
        "tokens of a sequence at its end": f"{case.tokens:,}: {case.prompt_tokens:,} + {case.new_tokens:,}",
    }
    return Markdown(markdown_table(("", "measured here"), rows.items()))


def check_free_batch(study: StreamingStudy, sequences: object, cache_gb: object) -> Markdown:
    """The verdicts on two answers about a case that was not measured: the study's model on a disk FASTER times as fast,
    with no resident layer, counting only the matrices of the layers. With how many sequences does computing a step take
    as long as reading it? And how many GB (of 10^9 bytes) are the keys and values of these sequences at their end?

    An answer is right within 1 %.
    """
    plan = study.plan
    right, weight = plan.free_rows / FASTER, plan.work.bytes_per_weight
    slower_disk = f"this is for the disk here; the disk in the question is {FASTER} times as fast"
    mistakes = {
        FASTER * right: slower_disk,
        FASTER**2 * right: "a faster disk is hidden by fewer sequences, not by more",
        2 * right: "each row needs two FLOPs per weight: a multiplication and an addition",
        8 * right: "s is in bytes, not in bits",
        1 / right: "the other way round: the faster the disk, the fewer sequences hide it",
        right / 1e3: "D and F both count in 10^9; is one of them in other units?",
        right * 1e3: "D and F both count in 10^9; is one of them in other units?",
    }
    if abs(weight - 1) > 0.05:
        mistakes[right / weight] = f"a weight on the disk does not take exactly one byte in {plan.case.precision}"
    if plan.free_batch is not None:
        mistakes[float(plan.free_batch)] = f"this is the figure's: {slower_disk}"
    mistakes[float(plan.largest_batch)] = "this is the largest that fits; the question is about the rates"
    return Markdown(f"- sequences: {checked(sequences, right, mistakes)}\n{_cache_verdict(study, cache_gb, right)}")


def _cache_verdict(study: StreamingStudy, cache_gb: object, sequences: float) -> str:
    """The verdict on the GB of the keys and values of `sequences` sequences."""
    from labkit.models.policies import model_config_of
    from labkit.weights.precision import precision_of
    from labkit.weights.resolve import resolve

    case = study.plan.case
    config = model_config_of(resolve(case.model).hf_config)
    dtype = precision_of(case.precision).dtype
    assert dtype is not None  # a plan has a type
    right = sequences * case.tokens * config.kv_bytes_per_token(dtype) / 1e9
    mistakes = {
        right / 2: "this is half of it: count keys and values, and two bytes for each number of 16 bits",
        right * case.prompt_tokens / case.tokens: "this is for the prompts; new tokens have keys and values, too",
        right / config.num_layers: "this is for one layer; every layer has its own",
        right / sequences: "this is for one sequence",
        right * 1e9 / 2**30: "a GB of 1,024 to the third; here it has 10^9 bytes",
        right * 1e3: "these are MB",
    }
    if config.num_heads != config.num_kv_heads:
        mistakes[right * config.num_heads / config.num_kv_heads] = (
            "query heads share keys and values here: count the key-value heads"
        )
    return f"- GB of their keys and values: {checked(cache_gb, right, mistakes)}"
