"""Profiles a command, or a function, in a process of its own: one call from a shell or a notebook cell.

The capture is the report of nsys, or of torch.profiler where nsys is missing, with the same stages. The kept files are
scrubbed (`labkit.nsys.scrub`) and have a record next to them. Everything else is gone when the call returns, and also
when its process is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, get_args

from labkit.nsys.capture.command import CaptureSource, RankReports, Window, split_torchrun, torch_profiler_command
from labkit.nsys.capture.job import CaptureJob, temporary_folder, workplace
from labkit.nsys.capture.result import Capture, CaptureError, CaptureInterrupted, CommandFailedError
from labkit.nsys.tool import Nsys, find_nsys
from labkit.stages import Phase
from labkit.system.asked_from import given, on_command_line
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import RUNS
from labkit.system.pickled_call import pickle_call
from labkit.system.progress import Progress, unheard

OWN_RUN = " (labkit's own run of a model takes --model and no command)"


def profile(
    what: Sequence[str] | Callable[[], object],
    *,
    name: str | None = None,
    output: str | os.PathLike[str] = RUNS,
    case: Mapping[str, Any] | None = None,
    window: Window | Phase | None = None,
    ranks: RankReports = "one",
    source: CaptureSource = "auto",
    tax: bool = True,
    sampling: bool = False,
    keep_raw: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    echo: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Profiles `what`, a command as a list of words or a function without arguments, in a fresh process.

    name: of the files, OUTPUT/NAME.sqlite (nsys) or .json.gz (torch.profiler) and OUTPUT/NAME.json; by default made of
    the command and the time.
    case: a description of the run, for the record.
    window: capture only this range, or the first prefill or decode.
    ranks: for a command that starts with torchrun, "one" report of all ranks or one "per-rank".
    source: "nsys", "torch" (torch.profiler) or "auto", which is nsys if it is installed.
    tax: run the command once more, unprofiled, to measure the cost of profiling.
    keep_raw: keep nsys's own report too, which holds all secrets.
    environment: variables for the command, in addition to this process's.

    Raises ValueError for a request that cannot be served; CommandFailedError where the command fails, CaptureError
    where nothing was captured, and CaptureInterrupted on Ctrl-C. These errors keep and name the captured files.
    """
    window = Window.of_phase(window) if isinstance(window, Phase) else window or Window()
    _check(what, window, ranks, source, name)
    if not callable(what) and shutil.which(what[0], path=dict(environment or {}).get("PATH")) is None:
        raise UserError(  # nsys would capture nothing
            f"got the command {what[0]!r}, and there is no such program on PATH; expected a program and its arguments, "
            f"such as python script.py{OWN_RUN if on_command_line() else ''}"
        )
    plain_case = _plain(case or {})
    nsys = _profiler(source)
    words = None if callable(what) else tuple(what)
    if nsys is None and words is not None:
        torch_profiler_command(words, Path(), window)  # raises for a command that torch.profiler cannot capture
    pickled = pickle_call(what) if callable(what) else b""
    run_environment = dict(os.environ) | dict(environment or {})
    folder = expanded(output)
    folder.mkdir(parents=True, exist_ok=True)
    with workplace(folder, temporary_folder(run_environment)) as place:
        job = CaptureJob(
            command=words or _call(pickled, place.folder),
            ranks=ranks,
            name=name or _default_name(what),
            output=folder,
            place=place,
            window=window,
            nsys=nsys,
            environment=run_environment,
            case=plain_case,
            keep_raw=keep_raw,
        )
        return _take(job, sampling, tax, timeout_s, echo, progress or unheard)


def _take(
    job: CaptureJob,
    sampling: bool,
    tax: bool,
    timeout_s: float | None,
    echo: Callable[[str], None] | None,
    say: Progress,
) -> Capture:
    """Runs the command, under the profiler and without it, and keeps the capture."""
    total, plain = 3 if tax else 2, None
    say(0, total, f"profiling with {job.profiler}")
    ended = job.run_profiled(sampling, timeout_s, echo)
    say(1, total, "reading and scrubbing the report")
    reports = job.collect(ended)
    if tax and ended.well:
        say(2, total, "the same run without a profiler")
        plain = job.run_plain(timeout_s)
    capture = job.keep(reports, ended, plain)
    say(total, total, "done")
    if ended.interrupted or (plain and plain.interrupted):
        raise CaptureInterrupted(capture)
    if ended.exit_code or ended.late:
        raise CommandFailedError(job.failure(ended, capture), ended.exit_code, capture)
    assert capture is not None
    return capture


def _check(
    what: Sequence[str] | Callable[[], object], window: Window, ranks: str, source: str, name: str | None
) -> None:
    """Raises ValueError for a request that no profiler could serve."""
    if not callable(what) and (isinstance(what, str) or not what):
        raise UserError(f"got {what!r}, expected a command as a list of words, or a function")
    for option, value, choices in (
        ("ranks", ranks, get_args(RankReports)),
        ("source", source, get_args(CaptureSource)),
    ):
        if value not in choices:
            raise UserError(f"got {option} = {value!r}, expected one of {', '.join(choices)}")
    if name is not None and Path(name).name != name:
        raise UserError(f"got name = {name!r}, expected a file name without folders; the folder is `output`")
    if window.occurrence < 1:
        raise UserError(f"got occurrence = {window.occurrence}, expected 1 (the first range of the name) or more")
    if ranks == "per-rank":
        split_torchrun([] if callable(what) else what)  # raises for a command that starts no ranks


def _plain(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case as JSON has it, for the record. Raises UserError for a value that JSON cannot hold."""
    for name, value in case.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise UserError(f"got case[{name!r}] = {value!r}, expected plain data, as JSON has it ({error})") from None
    return json.loads(json.dumps(dict(case)))


def _profiler(source: str) -> Nsys | None:
    """The nsys to use, None for torch.profiler. Raises CaptureError for an nsys that makes no reports."""
    nsys = find_nsys() if source != "torch" else None
    if source == "nsys" and nsys is None:
        raise UserError(
            f"nsys is not installed; labkit doctor says how to install it, or use {given('source', 'torch')}"
        )
    if nsys is not None and (fault := nsys.importer_fault()):
        raise CaptureError(str(fault))
    return nsys


def _call(pickled: bytes, folder: Path) -> tuple[str, ...]:
    """The command that calls a function."""
    file = folder / "call.pickle"
    file.write_bytes(pickled)
    return (sys.executable, "-u", "-m", "labkit.nsys.capture.call", str(file))


def _default_name(what: Sequence[str] | Callable[[], object]) -> str:
    if callable(what):
        stem = getattr(what, "__name__", "call").strip("<>")
    else:
        stem = next((PurePath(word).stem for word in what if word.endswith(".py")), PurePath(what[0]).name)
    return f"{stem}-{datetime.now():%Y%m%dT%H%M%S}"
