"""Profile a command, or a function, in a process of its own: one call from a shell or a notebook cell.

With nsys the capture is its report, without it torch.profiler's, with the same stages. What is kept under the output
folder is scrubbed (`labkit.nsys.scrub`) and has a record beside it; everything else is gone when the call returns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, get_args

from labkit.nsys.capture.command import RankReports, Source, Window, nsys_command, torch_profiler_command
from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.capture.scrubbing import Redaction, scrub
from labkit.nsys.capture.tax import Tax, count_steps, tax_of_runs, tax_of_steps
from labkit.nsys.capture.verify import Contents, cause, contents, full, lost
from labkit.nsys.process import Ended, run
from labkit.nsys.reader.reading import read
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.tool import Nsys, find_nsys
from labkit.nsys.trace import Trace
from labkit.stages import STEP_TIMES, Phase
from labkit.system.errors import RunError, UserError
from labkit.system.pickled_call import pickle_call
from labkit.system.whole_file import write_whole

PROFILED, PLAIN = "profiled.jsonl", "plain.jsonl"  # the times of the steps of either run, as labkit takes them itself
LOST_AGENT = "End of file"  # all that nsys says where its own agent went away before the command began: try again
Progress = Callable[[float, float, str], None]  # done, total, what happens now


@dataclass(frozen=True)
class Capture:
    """What a profiled run left: `files`, one or one for each rank, and the record beside the first."""

    files: tuple[Path, ...]
    record_file: Path
    record: CaptureRecord

    def trace(self) -> Trace:
        """The capture as frames, read once and then from the cache."""
        return read(self.files)


class CaptureError(RunError):
    """Nothing usable was captured. The message says which of the known causes it was."""


class CommandFailedError(CaptureError):
    """The command failed; what was captured before is in `capture`, if anything was."""

    def __init__(self, message: str, exit_code: int, capture: Capture | None) -> None:
        super().__init__(message)
        self.exit_code, self.capture = exit_code, capture


class CaptureInterrupted(KeyboardInterrupt):
    """Ctrl-C; what was captured before is in `capture`, if anything was."""

    def __init__(self, capture: Capture | None) -> None:
        super().__init__()
        self.capture = capture


def profile(
    what: Sequence[str] | Callable[[], object],
    *,
    name: str | None = None,
    output: str | os.PathLike[str] = "runs",
    case: Mapping[str, Any] | None = None,
    window: Window | Phase | None = None,
    ranks: RankReports = "one",
    source: Source = "auto",
    tax: bool = True,
    sampling: bool = False,
    keep_raw: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    echo: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Profile `what`, a command as a list of words or a function without arguments, in a fresh process.

    name: of the files, OUTPUT/NAME.sqlite (nsys) or .json.gz (torch.profiler) and OUTPUT/NAME.json; by default made of
    the command and the time. case: what this is a capture of, for the record. window: capture only this range, or the
    first prefill or decode. ranks: of a command that starts with torchrun, "one" report of all or one "per-rank".
    source: "nsys", "torch" (torch.profiler) or "auto", nsys where it is installed. tax: run the command once more,
    unprofiled, to tell what profiling costs. keep_raw: keep nsys's own report too, secrets and all. environment: set
    for the command, beside what this process has.

    Raises ValueError for a request that cannot be served; CommandFailedError where the command fails, CaptureError
    where nothing was captured, CaptureInterrupted on Ctrl-C: each keeps and names what there is.
    """
    if isinstance(window, Phase):
        window = Window.of_phase(window)
    window = window or Window()
    for option, value, choices in (("ranks", ranks, get_args(RankReports)), ("source", source, get_args(Source))):
        if value not in choices:
            raise UserError(f"got {option} = {value!r}, expected one of {', '.join(choices)}")
    if name is not None and Path(name).name != name:
        raise UserError(f"got name = {name!r}, expected a file name without folders; the folder is `output`")
    if window.occurrence < 1:
        raise UserError(f"got occurrence = {window.occurrence}, expected 1 (the first range of the name) or more")
    nsys = find_nsys() if source != "torch" else None
    if source == "nsys" and nsys is None:
        raise UserError("nsys was asked for and is not installed; labkit doctor says how to, or use source='torch'")
    if nsys is not None and (problem := nsys.importer_problem()):
        raise CaptureError(problem)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".capture-") as temporary:
        workplace = Path(temporary)
        command = _command(what, workplace)
        job = _Job(
            command=tuple(command),
            name=name or _default_name(what, command),
            folder=folder,
            workplace=workplace,
            window=window,
            nsys=nsys,
            environment=dict(os.environ) | dict(environment or {}),
            case=dict(case or {}),
            keep_raw=keep_raw,
        )
        say = progress or (lambda done, total, label: None)
        total = 3 if tax else 2
        say(0, total, f"profiling with {job.profiler}")
        profiled = job.environment | {STEP_TIMES: str(workplace / PROFILED)}
        ended = _run(job.profile_command(ranks, sampling), profiled, timeout_s, echo)
        if nsys is not None and ended.exit_code and ended.said == (LOST_AGENT,):
            ended = _run(job.profile_command(ranks, sampling), profiled, timeout_s, echo)
        say(1, total, "reading and scrubbing the report")
        reports = job.collect(ended)
        plain = None
        if tax and reports and ended.well:
            say(2, total, "the same run without a profiler")
            plain = _run(job.command, job.environment | {STEP_TIMES: str(workplace / PLAIN)}, timeout_s, None)
        capture = job.keep(reports, ended, plain) if reports else None
        say(total, total, "done")
    if ended.interrupted or (plain and plain.interrupted):
        raise CaptureInterrupted(capture)
    if ended.exit_code or ended.late:
        raise CommandFailedError(_failure(ended, capture, job.places), ended.exit_code, capture)
    assert capture is not None
    return capture


@dataclass(frozen=True)
class _Job:
    command: tuple[str, ...]
    name: str
    folder: Path
    workplace: Path
    window: Window
    nsys: Nsys | None
    environment: dict[str, str]
    case: dict[str, Any]
    keep_raw: bool

    @property
    def profiler(self) -> str:
        return f"nsys {self.nsys.version_text}" if self.nsys else f"torch.profiler {version('torch')}"

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders that nsys writes to."""
        return self.folder, Path(self.environment.get("TMPDIR", tempfile.gettempdir()))

    def profile_command(self, ranks: RankReports, sampling: bool) -> list[str]:
        output = self.workplace / "report"
        if self.nsys is None:
            return torch_profiler_command(self.command, output, self.window)
        return nsys_command(
            self.nsys.path,
            self.command,
            output,
            window=self.window,
            ranks=ranks,
            gpu=has_gpu(),
            sampling=sampling,
        )

    def collect(self, ended: Ended) -> list[Path]:
        """The reports that hold something. Raises CaptureError if a run that ended well left none, or not all."""
        reports = sorted(self.workplace.glob("report*.sqlite" if self.nsys else "report*.json"))
        if self.nsys and self.window.occurrence > 1:  # nsys writes one for each range until then
            reports = [report for report in reports if report.stem.endswith(f".{self.window.occurrence}")]
        if self.nsys is None:
            found = {report: Contents(ranges=1) for report in reports}
        else:
            found = {report: contents(report) for report in reports}
        used = [report for report, inside in found.items() if inside.ranges or inside.operations]
        if ended.well:
            announced = count_steps(self.workplace / PROFILED)
            if self.nsys and reports and (problem := lost(list(found.values()), announced, self.window)):
                raise CaptureError(problem)
            if not used:
                raise CaptureError(
                    f"nothing was captured: {cause(self.workplace, reports, self.window, self.profiler)}"
                )
        return used

    def tax(self, profiled: Ended, plain: Ended) -> Tax:
        of_steps = tax_of_steps(self.workplace / PROFILED, self.workplace / PLAIN, self.window.phase)
        return of_steps or tax_of_runs(profiled.seconds, plain.seconds)

    def keep(self, reports: list[Path], ended: Ended, plain: Ended | None) -> Capture:
        """Move what was captured to its place, scrubbed, with the record beside it. `plain`: the unprofiled run."""
        remarks = ["interrupted by Ctrl-C"] * ended.interrupted
        if plain is not None and not plain.well:
            remarks.append("the unprofiled run did not end well, so what profiling costs is not known")
        suffix = ".sqlite" if self.nsys else ".json.gz"
        files = []
        for report in reports:
            rank = report.stem.partition("-r")[2].partition(".")[0] if "-r" in report.stem else ""
            target = self.folder / f"{self.name}{f'-r{rank}' if rank else ''}{suffix}"
            if self.nsys:
                scrub(report, target, self.environment)
            else:
                write_chrome(read(report, cache=False), target)
            files.append(target)
            if self.keep_raw and (raw := report.with_suffix(".nsys-rep")).exists():
                shutil.move(raw, target.with_suffix(".nsys-rep"))
        clean = Redaction(self.environment.items())
        record = CaptureRecord(
            created=datetime.now(UTC),
            files=tuple(file.name for file in files),
            command=tuple(_shared(word, clean) for word in self.command),
            case={
                name: _shared(value, clean) if isinstance(value, str) else value for name, value in self.case.items()
            },
            window=self.window.name,
            profiler=self.profiler,
            exit_code=ended.exit_code,
            seconds=round(ended.seconds, 3),
            tax=self.tax(ended, plain) if plain is not None and plain.well else None,
            environment=_environment(),
            remarks=tuple(remarks),
        )
        record_file = self.folder / f"{self.name}.json"
        write_whole(record_file, record.model_dump_json(indent=2) + "\n")
        return Capture(tuple(files), record_file, record)


def has_gpu() -> bool:
    """Whether this machine passes an NVIDIA GPU on to programs."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _run(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None, echo: Callable[[str], None] | None
) -> Ended:
    try:
        return run(command, environment, timeout_s=timeout_s, echo=echo)
    except FileNotFoundError as error:
        raise UserError(
            f"got the command {error.filename!r}, which was not found; expected a program on PATH"
        ) from None


def _command(what: Sequence[str] | Callable[[], object], workplace: Path) -> Sequence[str]:
    if callable(what):
        pickled = workplace / "call.pickle"
        pickled.write_bytes(pickle_call(what))
        return [sys.executable, "-u", "-m", "labkit.nsys.capture.call", str(pickled)]
    if isinstance(what, str) or not what:
        raise UserError(f"got {what!r}, expected a command as a list of words, or a function")
    return what


def _default_name(what: object, command: Sequence[str]) -> str:
    if callable(what):
        stem = getattr(what, "__name__", "call").strip("<>")
    else:
        stem = next((PurePath(word).stem for word in command if word.endswith(".py")), PurePath(command[0]).name)
    return f"{stem}-{datetime.now():%Y%m%dT%H%M%S}"


@cache
def _environment() -> dict[str, Any] | None:
    """labkit's record of the machine, which needs torch, hence from a process of its own."""
    program = (
        "import os; from labkit.harness.environment import read_environment as read; "
        "threads = int(os.environ.get('OMP_NUM_THREADS', 0)) or len(os.sched_getaffinity(0)); "
        "print(read(threads).model_dump_json())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None


def _shared(word: str, clean: Redaction) -> str:
    """A word of the command without the folders of this machine."""
    return clean(PurePath(word).name if os.path.isabs(word) else word)


def _failure(ended: Ended, capture: Capture | None, places: Iterable[Path]) -> str:
    said = "\n".join(f"    {line}" for line in ended.said) or "    (it said nothing)"
    kept = f"what was captured is in {capture.files[0]}" if capture else "nothing was captured"
    how = f"was ended after {ended.seconds:.0f} s" if ended.late else f"ended with exit code {ended.exit_code}"
    if ended.said == (LOST_AGENT,):
        return f"nsys lost its agent twice before the command began ({LOST_AGENT!r}){full(places)}; run it again"
    return f"the command {how}; {kept}{full(places)}. Its last lines:\n{said}"
