"""One capture in progress: the command under its profiler, the reports that it leaves, and the files kept of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from labkit.nsys.agent import ATTEMPTS, lost_agent, run_with_agent
from labkit.nsys.capture.command import RankReports, Window, nsys_command, torch_profiler_command
from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.capture.redaction import Redaction, without_secrets
from labkit.nsys.capture.result import Capture, CaptureError
from labkit.nsys.capture.scrubbing import scrub, scrub_trace
from labkit.nsys.capture.tax import Tax, count_forked, count_steps, tax_of_runs, tax_of_steps
from labkit.nsys.capture.verify import Contents, cause, contents, contents_of_torch, forks_unseen, full, lost
from labkit.nsys.process import Ended, run
from labkit.nsys.reader.reading import read
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.tool import Nsys
from labkit.nsys.trace import TraceError
from labkit.stages import STEP_TIMES
from labkit.system.child import finished
from labkit.system.errors import RunError
from labkit.system.marked_run import end_marked, ended_with_owner
from labkit.system.owned_folder import owned_folder
from labkit.system.processors import usable_processors
from labkit.system.whole_file import whole_file, write_whole

PROFILED, PLAIN = "profiled.jsonl", "plain.jsonl"  # the step times of the two runs, as labkit itself takes them
WORKPLACE, SCRATCH = ".capture-", "labkit-nsys-"  # prefixes of the folders that a capture removes at its end
SHOWN_LINES = 15  # of the output of a command that failed
Echo = Callable[[str], None]


@dataclass(frozen=True)
class Workplace:
    """The folders of a capture in progress."""

    folder: Path  # in the output folder
    scratch: Path  # nsys's own folder for temporary files

    @property
    def mark(self) -> str:
        """The mark of this capture's processes. The folder's name keeps it for when the owner is killed."""
        return self.folder.name


@contextmanager
def workplace(output: Path, temporary: Path) -> Iterator[Workplace]:
    """Both folders, removed at the end with all processes of the capture, however this process ends.

    Processes and folders that killed captures left in the same places are ended and removed first.
    """
    with (
        owned_folder(WORKPLACE, output, before_removal=lambda folder: end_marked(folder.name)) as folder,
        owned_folder(SCRATCH, temporary) as scratch,
    ):
        place = Workplace(folder, scratch)
        with ended_with_owner(place.mark, (folder, scratch)):
            yield place


@dataclass(frozen=True)
class Reports:
    """The reports that the profiler left."""

    used: list[Path]
    damaged: list[Path]  # half written by a run that did not end well


@dataclass(frozen=True)
class CaptureJob:
    """The command of a capture, its options and its output."""

    command: tuple[str, ...]
    ranks: RankReports
    name: str
    output: Path
    place: Workplace
    window: Window
    nsys: Nsys | None
    environment: dict[str, str]
    case: dict[str, Any]
    keep_raw: bool

    @property
    def profiler(self) -> str:
        return f"nsys {self.nsys.version_text}" if self.nsys else f"torch.profiler {version('torch')}"

    @property
    def under_launcher(self) -> bool:
        """Whether torch's launcher starts an nsys for each rank."""
        return self.ranks == "per-rank"

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders that nsys writes to."""
        return self.output, self.place.scratch.parent

    @cached_property
    def clean(self) -> Redaction:
        """Redaction of files, which may be shared."""
        hosts = [os.uname().nodename] if hasattr(os, "uname") else []
        return Redaction.of_run(self.environment.items(), command=self.command, hosts=hosts)

    @cached_property
    def for_user(self) -> Redaction:
        """Redaction of the output that the user sees."""
        return Redaction.of_secrets(self.environment.items(), self.command)

    def run_profiled(self, sampling: bool, timeout_s: float | None, echo: Echo | None) -> Ended:
        """Runs the command under the profiler."""
        environment = self.environment | {STEP_TIMES: str(self.place.folder / PROFILED)}
        command = self._profile_command(sampling)
        if self.nsys is None:
            return self._run(command, environment, timeout_s, echo)
        environment["TMPDIR"] = str(self.place.scratch)
        return run_with_agent(
            lambda: self._run(command, environment, timeout_s, echo), under_launcher=self.under_launcher
        )

    def run_plain(self, timeout_s: float | None) -> Ended:
        """Runs the command alone, to measure the cost of profiling."""
        environment = self.environment | {STEP_TIMES: str(self.place.folder / PLAIN)}
        return self._run(self.command, environment, timeout_s, None)

    def collect(self, ended: Ended) -> Reports:
        """The reports that are not empty.

        For a run that ended well, raises CaptureError if reports or steps are missing, and TraceError for a damaged
        report.
        """
        folder = self.place.folder
        reports = sorted(folder.glob("report*.sqlite" if self.nsys else "report*.json"))
        if self.nsys and self.window.occurrence > 1:  # nsys writes one for each range up to this one
            reports = [report for report in reports if report.stem.endswith(f".{self.window.occurrence}")]
        contents_of: dict[Path, Contents] = {}
        damaged: list[Path] = []
        for report in reports:
            try:
                contents_of[report] = contents(report) if self.nsys else contents_of_torch(report)
            except TraceError:
                if ended.well:
                    raise
                damaged.append(report)
        used = [report for report, counts in contents_of.items() if counts.ranges or counts.operations]
        if ended.well:
            announced = count_steps(folder / PROFILED)
            if self.nsys and reports and (problem := lost(list(contents_of.values()), announced, self.window)):
                raise CaptureError(problem)
            if not used:
                forked = count_forked(folder / PROFILED)
                why = cause(folder, reports, self.window, self.profiler, forked)
                raise CaptureError(f"nothing was captured: {why}")
        return Reports(used, damaged)

    def keep(self, reports: Reports, ended: Ended, plain: Ended | None) -> Capture | None:
        """Writes the scrubbed captures and their record to the output folder; None if nothing was captured.

        plain: the unprofiled run.
        """
        files: list[Path] = []
        damaged = [self._target(report).name for report in reports.damaged]
        for report in reports.used:
            target = self._target(report)
            try:
                self._keep_report(report, target)
            except TraceError:
                if ended.well:
                    raise
                damaged.append(target.name)
            else:
                files.append(target)
        if not files:
            return None
        remarks = ["interrupted by Ctrl-C"] * ended.interrupted
        if damaged:
            remarks.append(f"left out, because the run ended before they were whole: {', '.join(sorted(damaged))}")
        if forked := count_forked(self.place.folder / PROFILED):
            remarks.append(forks_unseen(forked, self.profiler))
        if plain is not None and not plain.well:
            remarks.append("the unprofiled run did not end well, so the cost of profiling is not known")
        environment = None
        try:
            environment = environment_of(self.environment)
        except RunError as error:
            remarks.append(self.clean(str(error)))
        case = self._shared(self.case)
        words = without_secrets(self.command)
        self.clean.replaced["the command"] += words != list(self.command)
        command = tuple(map(self._shared, words))
        record = CaptureRecord(
            created=datetime.now(UTC),
            files=tuple(file.name for file in files),
            command=command,
            case=case,
            window=self.window.name,
            profiler=self.profiler,
            exit_code=ended.exit_code,
            seconds=round(ended.seconds, 3),
            tax=self._tax(ended, plain) if plain is not None and plain.well else None,
            environment=environment,
            taken_cores=ended.taken_cores,
            remarks=tuple(remarks),
            redacted=dict(sorted((+self.clean.replaced).items())),
        )
        record_file = self.output / f"{self.name}.json"
        write_whole(record_file, record.model_dump_json(indent=2) + "\n")
        return Capture(tuple(files), record_file, record)

    def failure(self, ended: Ended, capture: Capture | None) -> str:
        """The message about a command that did not end well."""
        said = ended.said_by_ranks[-SHOWN_LINES:]
        output = "\n".join(f"    {self.for_user(line)}" for line in said) or "    (it printed nothing)"
        kept = f"what was captured is in {capture.files[0]}" if capture else "nothing was captured"
        end = f"was ended after {ended.seconds:.0f} s" if ended.late else f"ended with exit code {ended.exit_code}"
        if self.nsys is not None and lost_agent(ended, under_launcher=self.under_launcher):
            return (
                f"nsys lost its agent {ATTEMPTS} times before the command began ({ended.said_by_ranks[-1]!r})"
                f"{full(self.places)}; end other captures, and run it again"
            )
        return f"the command {end}; {kept}{full(self.places)}. Its last lines:\n{output}"

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None, echo: Echo | None
    ) -> Ended:
        shown = None if echo is None else lambda line: echo(self.for_user(line))
        return run(command, environment, timeout_s=timeout_s, echo=shown, mark=self.place.mark)

    def _profile_command(self, sampling: bool) -> list[str]:
        report = self.place.folder / "report"
        if self.nsys is None:
            return torch_profiler_command(self.command, report, self.window)
        return nsys_command(
            self.nsys.path,
            self.command,
            report,
            window=self.window,
            ranks=self.ranks,
            gpu=has_gpu(),
            sampling=sampling,
            temporary=self.place.scratch.parent,
        )

    def _target(self, report: Path) -> Path:
        """The file that keeps a report."""
        rank = report.stem.partition("-r")[2].partition(".")[0] if "-r" in report.stem else ""
        return self.output / f"{self.name}{f'-r{rank}' if rank else ''}{'.sqlite' if self.nsys else '.json.gz'}"

    def _keep_report(self, report: Path, target: Path) -> None:
        if self.nsys:
            self.clean.replaced.update(scrub(report, target, self.environment, command=self.command))
        else:
            write_chrome(scrub_trace(read(report, cache=False), self.clean), target)
        if self.keep_raw and (raw := report.with_suffix(".nsys-rep")).exists():
            with whole_file(target.with_suffix(".nsys-rep")) as path:
                shutil.copyfile(raw, path)
            raw.unlink()  # it may be large

    def _tax(self, profiled: Ended, plain: Ended) -> Tax:
        folder = self.place.folder
        of_steps = tax_of_steps(folder / PROFILED, folder / PLAIN, self.window.phase)
        return of_steps or tax_of_runs(profiled.seconds, plain.seconds)

    def _shared(self, value: Any) -> Any:
        """Plain data with its texts redacted; of an absolute path only the name is left."""
        if isinstance(value, str):
            return self.clean(PurePath(value).name if os.path.isabs(value) else value)
        if isinstance(value, dict):
            return {name: self._shared(item) for name, item in value.items()}
        return [self._shared(item) for item in value] if isinstance(value, list) else value


def has_gpu() -> bool:
    """Whether programs on this machine can use an NVIDIA GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def temporary_folder(environment: Mapping[str, str]) -> Path:
    """The folder in which programs with this environment put their temporary files."""
    return Path(environment.get("TMPDIR") or tempfile.gettempdir())


def environment_of(variables: Mapping[str, str]) -> dict[str, Any]:
    """labkit's record of the machine, as a command with these environment variables finds it.

    It needs torch, so it is made in a process of its own. Raises RunError where that fails.
    """
    first = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": 4, and 2 nested in each
    threads = (int(first) if first.isdecimal() else 0) or usable_processors()
    program = (
        "import sys; from labkit.harness.environment import read_environment as read; "
        "print(read(int(sys.argv[1])).model_dump_json())"
    )
    command = [sys.executable, "-P", "-c", program, str(threads)]
    child = finished(command, environment=variables)
    if child.returncode or not child.stdout:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise RunError(f"the machine of this run is not known: {reason}")
    return json.loads(child.stdout.splitlines()[-1])
