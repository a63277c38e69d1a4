"""`make bench`, the part about what people wait for around the steps of a short greedy generation: loading a model,
attention over long contexts, long prompts, padding, and the choice of tokens.

python -P -m labkit.bench.waiting [--only PART] [--rounds 5] [--output FOLDER]

The files are rewritten after each record, and a part that is measured again replaces its records. Cold starts have a
bench of their own, `labkit.bench.cold_start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import typer

from labkit.bench.bars import MS, SECONDS, SHARE, BarCheck, BarUnit, at_least, at_most
from labkit.bench.page import (
    NONE,
    BenchFiles,
    EpochCount,
    Output,
    Threads,
    llama_cpp_is_missing,
    machine_of,
    markdown_table,
    out,
    page_of,
    ratio_cell,
    stop_if_interrupted,
    verdict,
)
from labkit.bench.waiting_parts import (
    FUSED,
    GREEDY,
    WaitingBench,
    choices,
    comparisons,
    loads,
    padding,
    prompt_attention,
    step_attention,
)
from labkit.engine.team_size import team_size, torch_threads
from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment, read_environment
from labkit.harness.waiting_record import WaitingTime
from labkit.system.command import run_command
from labkit.system.errors import UserError

Record = WaitingTime | Comparison
ROUNDS = 5
COMPARED = "comparisons"
PARTS: dict[str, Callable[[WaitingBench], Iterator[Record]]] = {
    "load": loads,
    "attention of a step": step_attention,
    "attention of a prompt": prompt_attention,
    "padding": padding,
    "choice of a token": choices,
    COMPARED: lambda bench: comparisons(bench, not llama_cpp_is_missing()),
}
GFLOP_S = BarUnit("{:.0f} GFLOP/s", "{:g} GFLOP/s")
LOAD_BARS = {"bfloat16": 2.6, "float32": 4.0, "int8": 2.6, "int4-64": 3.5}  # seconds
OUTSIDE_BARS = {  # ms a token: greedy, sampling
    1: {GREEDY: 0.1, "greedy, a streamer": 0.3, "greedy, stop_strings": 0.3, "4 beams": 1.0, "": 0.4},
    8: {GREEDY: 0.15, "greedy, stop_strings": 0.3, "": 1.5},
}
STEP_SHARES = {"llama-shape": 0.75, "smollm2-135m": 0.6}  # a key serves one query head, or three
PROMPT_GFLOP_S, PROMPT_SHARE = 270.0, 0.8
PADDED_AT_MOST = 1.05
FIRST_TOKEN, LONG_SHARE = 2.0, 0.72


def main(
    only: Annotated[list[str] | None, typer.Option(help="A part; may be repeated.")] = None,
    rounds: EpochCount = ROUNDS,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure what people wait for on this machine."""
    if unknown := set(only or ()) - set(PARTS):
        raise UserError(f"got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    count = threads or team_size()
    environment = read_environment(count)
    files = BenchFiles.of(machine_of(environment), "waiting", output=output)
    parts = [part for part in PARTS if not only or part in only]
    kept: list[Record] = [*files.kept(WaitingTime), *files.kept(Comparison)]
    records = [record for record in kept if part_of(record) not in parts]
    with torch_threads(count):
        for part in parts:
            for record in PARTS[part](WaitingBench(environment, count, rounds)):
                records.append(record)
                files.write(records, page(records))
                if isinstance(record, Comparison):
                    stop_if_interrupted([record])
                out.print(
                    "; ".join(f"{check.what}: {check.figure}" for check in checks(record, records)) or part,
                    soft_wrap=True,
                )
    files.finish(records, page(records))


def part_of(record: Record) -> str:
    return COMPARED if isinstance(record, Comparison) else record.part


def checks(record: Record, records: Iterable[Record] = ()) -> Iterator[BarCheck]:
    """The bars of a record. records: all of them, for the greedy comparison next to one with sampling."""
    if isinstance(record, Comparison):
        yield from _checks_of_comparison(record, records)
    elif record.part == "load":
        for name, seconds in LOAD_BARS.items():
            yield at_most(name, record.median(name), seconds, SECONDS)
    elif record.part == "attention of a step":
        share = record.ratio("attention", "probe")
        yield at_least(f"{_case(record)}, share of the read rate", share.value, STEP_SHARES[record.model], SHARE)
    elif record.part == "attention of a prompt" and record.dtype == "float32":
        share = record.ratio("attention", "probe")
        yield at_least(f"{_case(record)}, share of the peak", share.value, PROMPT_SHARE, SHARE)
    elif record.part == "attention of a prompt":
        yield at_least(_case(record), record.median("attention"), PROMPT_GFLOP_S, GFLOP_S)
    elif record.part == "padding":
        yield at_most(
            f"{record.dtype}, one batch / one by one", record.ratio("one batch", "one by one"), PADDED_AT_MOST
        )
    else:
        bars = OUTSIDE_BARS[record.batch]
        for name in record.samples:
            bar = bars.get(name, bars[""])
            yield at_most(f"batch {record.batch}, {name}", record.median(name), bar, MS)


def _checks_of_comparison(record: Comparison, records: Iterable[Record]) -> Iterator[BarCheck]:
    case, names = record.case, f"{record.baseline.name} / {FUSED}"
    trusted = record.trust().trustworthy
    if case.prompt_tokens > 128:
        prompt_trusted = record.trust("ttft").trustworthy
        what = f"{case.prompt_tokens} tokens, {names} to the first token"
        yield at_least(what, record.ratio("ttft"), FIRST_TOKEN, trusted=prompt_trusted)
        if case.prompt_tokens == 6000 and (share := record.candidate.floor_share) is not None:
            yield at_least("share of the limit per token at 6000 tokens", share, LONG_SHARE, SHARE, trusted=trusted)
    elif case.sample and (greedy := _greedy(record, records)):
        what, bar = f"batch {case.batch}, {case.sample}, {names}", greedy.ratio("per_token").value
        yield at_least(what, record.ratio("per_token"), bar, written=f"{bar:.2f}x, greedy", trusted=trusted)


def _greedy(sampled: Comparison, records: Iterable[Record]) -> Comparison | None:
    """The comparison of the same case with greedy search."""
    case = sampled.case.model_copy(update={"sample": ""})
    return next((record for record in records if isinstance(record, Comparison) and record.case == case), None)


def page(records: Sequence[Record]) -> str:
    """The Markdown page of the records."""
    judged = [(part_of(record), check) for record in records for check in checks(record, records)]
    blocks = []
    for part in dict.fromkeys(map(part_of, records)):
        of = [record for record in records if part_of(record) == part]
        blocks += [f"## {part.capitalize()}", EXPLAINED[part], _table(of)]
    environment = _environment(records[0])
    return page_of(
        f"What people wait for on {environment.machine}",
        f"Medians. {verdict(judged)}",
        *blocks,
        environment.origin,
    )


EXPLAINED = {
    "load": "A folder of 2.2 GB in bfloat16 (random weights), in the page cache. Ways take turns. "
    "transformers maps the file and reads it in the first step, so both are also measured with a first token.",
    "attention of a step": "Keys and values that a step reads / the time of its attention, and the probed read rate "
    "before and after it.",
    "attention of a prompt": "FLOPs of the causal half / time, and the peak of the instruction that multiplies in this "
    "type.",
    "padding": "Prompts of 16, 64, 256 and 1,000 tokens until their first tokens, as one batch padded on the left and "
    "one by one.",
    "choice of a token": "Time of a token outside of the kernels: a generation of 72 tokens without the times of its "
    "kernels, minus the same for 8 tokens. Choosing the token counts as outside.",
    COMPARED: "As `labkit compare` measures: sides take turns of a few tokens.",
}


def _table(records: Sequence[Record]) -> str:
    compared = [record for record in records if isinstance(record, Comparison)]
    if compared:
        rows = [
            (
                record.case.title,
                record.baseline.name,
                ratio_cell(record, "ttft"),
                ratio_cell(record, "per_token"),
                NONE if record.candidate.floor_share is None else f"{record.candidate.floor_share:.0%}",
            )
            for record in compared
        ]
        return markdown_table(("case", "baseline", "first token", "per token", "share of the limit"), rows)
    waits = [record for record in records if isinstance(record, WaitingTime)]
    cells = [
        (_case(record), name, f"{record.median(name):.4g}", f"{min(values):.4g} to {max(values):.4g}")
        for record in waits
        for name, values in record.samples.items()
    ]
    return markdown_table(("case", "", f"median, {waits[0].unit}", "range"), cells)


def _case(record: WaitingTime) -> str:
    """Model, precision, batch and prompt of a record, as far as it has them."""
    sizes = [f"batch {record.batch}"] * (record.batch > 1) + [f"{record.tokens} tokens"] * (record.tokens > 0)
    return ", ".join([record.model, record.dtype, *sizes])


def _environment(record: Record) -> Environment:
    return record.candidate.environment if isinstance(record, Comparison) else record.environment


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
