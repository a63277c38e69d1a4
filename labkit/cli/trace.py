"""The commands that take and read captures: a thin layer over `labkit.nsys` and `labkit.figures`."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from labkit.cli.forms import check_no_capture
from labkit.cli.measuring import output_option
from labkit.cli.traces import Range, Rank, Window, window_of
from labkit.stages import Phase
from labkit.system.comma_list import listed
from labkit.system.errors import UserError
from labkit.system.interrupts import INTERRUPTED
from labkit.system.processors import usable_processors
from labkit.system.progress import progress_bar
from labkit.system.shown import shown
from labkit.system.terminal import line_writer, terminal
from labkit.system.whole_file import check_output_file

if TYPE_CHECKING:
    from labkit.nsys.capture.command import CaptureSource, RankReports
    from labkit.nsys.capture.result import Capture
    from labkit.nsys.doctor.check import DoctorCheck

SUFFIX = re.compile(r"\.(sqlite|nsys-rep|json(\.gz)?)$")  # of traces; the name itself may have dots, too
out = terminal(markup=False, highlight=False)  # a "[" in a path or a capture's name is no markup
err = terminal(stderr=True, markup=False, highlight=False)

Captures = Annotated[list[Path], typer.Argument(help="An nsys export (.sqlite) or a Chrome trace; one for each rank.")]
PhaseOption = Annotated[Phase, typer.Option("--phase", help="The steps to explain.")]


def profile(
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: a program and its arguments; it may be torchrun.")
    ] = None,
    impl: Annotated[str, typer.Option(help="fused, hf-eager, ...; a command reads it from LABKIT_IMPL.")] = "fused",
    model: Annotated[str, typer.Option(help="Without a command: a preset, a checkpoint folder, or a hub id.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="Without a command: float32, bfloat16 or float16.")] = "float32",
    batch: Annotated[int, typer.Option(help="Without a command: sequences in a batch.")] = 1,
    prompt: Annotated[int, typer.Option(help="Without a command: tokens of each prompt.")] = 32,
    new: Annotated[int, typer.Option(help="Without a command: tokens to generate.")] = 16,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default one per core, or the command's own.")
    ] = None,
    stage: Annotated[Phase | None, typer.Option(help="Capture only this phase, instead of the whole run.")] = None,
    range_: Annotated[
        str | None, typer.Option("--range", help="Capture only this NVTX range, NAME@DOMAIN, or cudaProfilerApi.")
    ] = None,
    occurrence: Annotated[int, typer.Option(help="Number of the phase or range of that name, from 1.")] = 1,
    ranks: Annotated[str, typer.Option(help="Reports of a torchrun command: one for all ranks, or per-rank.")] = "one",
    source: Annotated[str, typer.Option(help="nsys, torch (torch.profiler), or auto: nsys if installed.")] = "auto",
    tax: Annotated[bool, typer.Option(help="Run once more unprofiled, to measure the cost of profiling.")] = True,
    sampling: Annotated[bool, typer.Option(help="Let nsys also sample the CPUs.")] = False,
    keep_raw: Annotated[bool, typer.Option(help="Keep nsys's own report, with the secrets in it.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the files; by default the command and the time.")] = None,
    *,
    output: Annotated[Path, output_option("Folder for the capture and its record.")],
) -> None:
    """Profile a command given after `--`, or labkit's own run of a model, and remove secrets from the capture."""
    from labkit.nsys.capture.command import Window
    from labkit.studies.traces import own_command, own_window

    if stage is not None and range_ is not None:
        raise UserError(f"got --stage {stage} and --range {range_}; give one of them")
    case: dict[str, Any] = {"impl": impl}
    window = Window.of_phase(stage, occurrence) if stage else Window(range_, occurrence)
    if not command:
        window = window if window.name else own_window()
        threads = threads or usable_processors()
        case |= {"model": model, "dtype": dtype, "batch": batch, "prompt": prompt, "new": new, "threads": threads}
        options = {option: case[option] for option in ("dtype", "batch", "prompt", "new", "threads")}
        command = own_command(model, impl, **options)
        name = name or f"{Path(model).name}-{impl}"
    taken = _take(
        command,
        name=name,
        output=output,
        case=case,
        window=window,
        ranks=cast("RankReports", ranks),
        source=cast("CaptureSource", source),
        tax=tax,
        sampling=sampling,
        keep_raw=keep_raw,
        environment={"LABKIT_IMPL": impl} | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    )
    _show(taken)


def _show(taken: Capture) -> None:
    out.print(f"captured by {taken.record.profiler}")
    if taken.record.tax:
        out.print(f"profiling tax {taken.record.tax}")
    for file in (*taken.files, taken.record_file):
        out.print(str(file), soft_wrap=True)
    for remark in (*taken.record.remarks, taken.record.trust.sentence):
        if remark:
            err.print(f"note: {remark}", style="yellow", soft_wrap=True)


def _take(command: list[str], **options: Any) -> Capture:
    """Takes the capture, with its progress on stderr. A capture that fails or is interrupted ends this process."""
    from labkit.nsys.capture.profile import profile as take
    from labkit.nsys.capture.result import CaptureInterrupted, CommandFailedError

    # SIGTERM ends the profiler and keeps the capture so far, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bar(err) as follow:
            return take(command, echo=line_writer(err), progress=follow, **options)
    except CommandFailedError as failed:
        err.print(f"error: {failed}", style="red", soft_wrap=True)
        raise typer.Exit(failed.exit_code if 0 < failed.exit_code < 256 else 1) from None
    except CaptureInterrupted as stopped:
        kept = stopped.capture.files[0] if stopped.capture else "nothing"
        err.print(f"interrupted; kept: {kept}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def doctor(
    sampling: Annotated[bool, typer.Option(help="Also check the requirements of sampling the CPUs.")] = False,
    resolution: Annotated[
        bool,
        typer.Option(
            "--resolution",
            help="Instead measure the smallest difference that this machine tells apart in a minute, and keep it.",
        ),
    ] = False,
    model: Annotated[str | None, typer.Option(help="With --resolution: the engine's model; by default gpt2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="With --resolution; by default bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="With --resolution; by default one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check whether this machine can be profiled, with one line of repair for each fault."""
    from labkit.nsys.doctor.examination import examine

    settings = {"model": model, "dtype": dtype, "threads": threads}
    given = {name: value for name, value in settings.items() if value is not None}
    if resolution:
        _measure_resolution(given, as_json)
        return
    if given:
        raise UserError(f"got --{next(iter(given))}, which belongs to a measurement: add --resolution, or leave it out")
    with err.status("examining this machine"):
        checks = examine(sampling=sampling)
    _show_checks(checks, as_json)


def _measure_resolution(settings: dict[str, Any], as_json: bool) -> None:
    """Measures this machine's resolution, shows it and keeps it."""
    from labkit.harness.turns.resolution import measure_resolution
    from labkit.nsys.doctor.machine_checks import resolution_check
    from labkit.statistics.kept_resolutions import check_can_keep, keep_resolution

    check_can_keep()
    with progress_bar(err) as follow:
        measured = measure_resolution(**settings, progress=follow)
    _show_checks([resolution_check([measured])], as_json)
    keep_resolution(measured)  # last, so that the result is shown even if it cannot be kept


def _show_checks(checks: list[DoctorCheck], as_json: bool) -> None:
    from labkit.nsys.doctor.examination import Status, as_dict, doctor_table, worst

    if as_json:
        typer.echo(json.dumps(as_dict(checks)))
    else:
        out.print(doctor_table(checks, repairs=False))
        for check in checks:
            if check.repair:
                out.print(f"{check.name}: {check.repair}", soft_wrap=True)
    if worst(checks) is Status.FAIL:
        raise typer.Exit(1)


def stages(
    captures: Captures,
    by: Annotated[
        str, typer.Option(help="Columns to group by: stage, and any of phase, layer, rank, process.")
    ] = "phase,stage",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show the time of the steps in a capture, stage by stage."""
    from labkit.nsys.analysis.stage_table import stage_table
    from labkit.nsys.reader.reading import read

    table = stage_table(read(captures), listed(by))
    if as_json:
        rows = json.loads(table.frame.to_json(orient="records"))
        typer.echo(json.dumps({"rows": rows, "coverage": table.coverage, "clock": table.clock}))
        return
    out.print(table)
    for remark in table.remarks:
        err.print(f"note: {remark}", style="yellow")
    _say_load(*captures)


def explain(
    vanilla: Annotated[Path, typer.Argument(help="The capture of the baseline.")],
    fused: Annotated[Path, typer.Argument(help="The capture of the candidate.")],
    phase: PhaseOption = Phase.DECODE,
    output: Annotated[Path | None, typer.Option(help="Also write the waterfall: .html, .png, .svg or .pdf.")] = None,
) -> None:
    """Explain the difference between two captures of labkit's own runs, stage by stage.

    The parts of a step add up to the difference.
    """
    from labkit.figures.difference import difference_figure
    from labkit.figures.saving import save
    from labkit.nsys.analysis.difference import explain as explained
    from labkit.nsys.reader.reading import read

    if output is not None:
        check_no_capture(output, (vanilla, fused))
        check_output_file(output)
    first, second = _names(vanilla, fused)
    difference = explained(read(vanilla), read(fused), phase, names=(first, second))
    out.print(difference.text(), soft_wrap=True)
    _say_load(vanilla, fused)
    if output is not None:
        save(difference_figure(difference), output)
        out.print(str(output), soft_wrap=True)


def timeline(
    files: Annotated[list[Path], typer.Argument(help="Traces of nsys or torch.profiler, drawn one below the other.")],
    window: Window = None,
    range_: Range = None,
    rank: Rank = None,
    lane: Annotated[
        str | None, typer.Option(help="Regular expression: only threads and streams whose name or kind matches.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Open on this many decode steps, the first ones.", min=1)] = None,
    *,
    output: Annotated[
        Path, output_option(".html: a page; .json or .json.gz: for Perfetto and chrome://tracing.", "timeline.html")
    ],
) -> None:
    """Draw traces on one time axis, as a page to pan, zoom and search; or convert one for Perfetto."""
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.selection import Selection
    from labkit.nsys.timeline.export import write_chrome

    check_no_capture(output, files)
    check_output_file(output)
    if output.name.endswith((".json", ".json.gz")):
        narrowing = {"--window": window, "--range": range_, "--rank": rank, "--lane": lane, "--steps": steps}
        narrowed = [option for option, value in narrowing.items() if value]
        if len(files) > 1:
            raise UserError(
                f"got {len(files)} traces for {output.name}, which holds one; name one, or join ranks with "
                "labkit trace merge"
            )
        if narrowed:
            raise UserError(f"got {narrowed[0]} for {output.name}, which holds all of a trace: leave it out")
        write_chrome(read(files[0]), output)
    elif output.suffix == ".html":
        from labkit.widgets.timeline_page import write_timeline_page

        selection = Selection(window_of(window), ranks=tuple(rank or ()), range=range_)
        traces = dict(zip(_names(*files), map(read, files), strict=True))
        write_timeline_page(traces, output, selection=selection, lane=lane, steps=steps)
    else:
        raise UserError(f"got --output {output}, expected a name that ends in .html, .json or .json.gz")
    out.print(str(output), soft_wrap=True)


def _say_load(*files: Path) -> None:
    """Prints a note for each capture that was taken while other programs kept the processors busy."""
    from labkit.nsys.capture.record import record_beside

    for file in files:
        if (record := record_beside(file)) is not None and not record.trust.trustworthy:
            err.print(f"note: {shown(file.name)}: {record.trust.sentence}", style="yellow", soft_wrap=True)


def _names(*files: Path) -> tuple[str, ...]:
    names = [SUFFIX.sub("", file.name) for file in files]
    return tuple(names) if len(set(names)) == len(names) else tuple(str(file) for file in files)
