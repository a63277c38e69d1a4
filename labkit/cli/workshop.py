"""`labkit workshop`: a thin layer over `labkit.notebooks.workshop`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from labkit.cli.words import Command
from labkit.system.errors import RunError
from labkit.system.shown import shown
from labkit.system.terminal import terminal

if TYPE_CHECKING:
    from labkit.notebooks.workshop.exercises import Exercise, Report
    from labkit.notebooks.workshop.learner import Learner

out = terminal(markup=False, highlight=False)
err = terminal(stderr=True, markup=False, highlight=False)

workshop = typer.Typer(add_completion=False, help="Exercises for learners: start, check, hint, solve; and grades.")
Name = Annotated[str, typer.Argument(help="An exercise: its name or number; labkit workshop list has them.")]
Folder = Annotated[Path, typer.Option("--folder", help="The learner's folder.", show_default="workshop")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of what the check draws; by default a new one.")]
HERE, GRADES = Path("workshop"), Path("grades.csv")
LOOK_S = 0.5  # between two looks at the files that are watched


@workshop.callback(invoke_without_command=True)
def bare(call: typer.Context) -> None:
    if call.invoked_subcommand is None:
        list_exercises()


@workshop.command("list", cls=Command)
def list_exercises(folder: Folder = HERE) -> None:
    """List the exercises, the minutes they take, and how far you are."""
    from labkit.notebooks.workshop.exercises import exercises
    from labkit.notebooks.workshop.learner import Learner

    progress = Learner(folder).progress
    states = progress.exercises if progress else {}
    table = Table("", Column("name", no_wrap=True), "question", "minutes", "needs", "you")
    for name, exercise in exercises().items():
        state = states.get(name)
        yours = "" if state is None else "solved" if state.passed else "started"
        table.add_row(str(exercise.number), name, exercise.question, str(exercise.minutes), exercise.needs, yours)
    out.print(table)


@workshop.command("start", cls=Command)
def start(
    name: Name,
    folder: Folder = HERE,
    learner: Annotated[
        str | None, typer.Option(help="Your name, from which your numbers are drawn; by default the user's.")
    ] = None,
) -> None:
    """Copy the files of an exercise to your folder. Files that are there stay."""
    exercise, yours = _opened(name, folder)
    work = yours.start(exercise, learner)
    typer.echo(shown(f"{work}: read {work / 'exercise.ipynb'}, edit {', '.join(exercise.files)}"))
    progress = yours.progress
    numbers = exercise.numbers(progress.learner) if progress else {}
    if numbers:
        typer.echo("your numbers: " + ", ".join(f"{label} {value}" for label, value in numbers.items()))
    typer.echo(f"then: labkit workshop check {exercise.name}")
    if exercise.prepare is not None:
        typer.echo("compiling the kernels that the check runs; half a minute, once")
        with suppress(RunError):  # the check says why it has no kernels
            exercise.prepare()


@workshop.command("check", cls=Command)
def check(name: Name, folder: Folder = HERE, seed: Seed = None) -> None:
    """Check your files of an exercise. Exit code 1: something is not right yet."""
    exercise, yours = _opened(name, folder)
    report = yours.check(exercise, seed)
    _print(report)
    if not report.passed:
        raise typer.Exit(1)


@workshop.command("watch", cls=Command)
def watch(name: Name, folder: Folder = HERE) -> None:
    """Check an exercise whenever you save one of its files. Ctrl-C ends it."""
    exercise, yours = _opened(name, folder)
    files = [yours.folder / exercise.folder.name / file for file in exercise.files]
    before: list[int] = []
    while True:
        now = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
        if now != before:
            before = now
            _print(yours.check(exercise))
            out.print("watching; Ctrl-C ends it", style="dim")
        time.sleep(LOOK_S)


@workshop.command("hint", cls=Command)
def hint(name: Name, folder: Folder = HERE) -> None:
    """Show the next hint of an exercise."""
    exercise, yours = _opened(name, folder)
    text, number, count = yours.hint(exercise)
    out.print(f"hint {number} of {count}", style="bold")
    out.print(text)


@workshop.command("solve", cls=Command)
def solve(name: Name, folder: Folder = HERE) -> None:
    """Copy the solution of an exercise next to your files."""
    exercise, yours = _opened(name, folder)
    typer.echo(shown(str(yours.solve(exercise))))


@workshop.command("progress", cls=Command)
def progress(folder: Folder = HERE) -> None:
    """Show how far you are."""
    from labkit.notebooks.workshop.learner import Learner

    yours = Learner(folder).progress
    if yours is None:
        typer.echo(f"nothing was started in {shown(str(folder))}; labkit workshop list shows the exercises")
        return
    table = Table(
        Column("exercise", no_wrap=True), "started", "checks", "hints", "solved", title=Text(shown(yours.learner))
    )
    for name, state in yours.exercises.items():
        table.add_row(shown(name), state.started, str(state.checks), str(state.hints), state.passed or "not yet")
    out.print(table)


@workshop.command("grade", cls=Command)
def grade(
    submissions: Annotated[Path, typer.Argument(help="Folder with the learners' folders.")],
    only: Annotated[list[str] | None, typer.Option(help="An exercise; may be repeated. By default all.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of what the checks draw; by default that of the table, else a new one.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Table of the grades, as CSV; grading goes on where it was.")] = GRADES,
) -> None:
    """Check the files of many learners again, with a seed of your own."""
    from labkit.notebooks.workshop.exercises import find_exercise
    from labkit.notebooks.workshop.grading import NOT_HANDED_IN, grade, remarks, seed_of
    from labkit.system.progress import progress_bar

    seed = seed_of(output) if seed is None else seed
    with progress_bar(err) as follow:
        grades = grade(submissions, only or (), seed=seed, output=output, progress=follow)
    numbers = {of.exercise: str(find_exercise(of.exercise).number) for of in grades}
    legend = f"+ right   - not yet   . {NOT_HANDED_IN}   seed {seed}"
    columns = ("folder", "learner", *numbers.values(), "right")
    table = Table(*columns, caption=legend, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for folder in dict.fromkeys(of.submission for of in grades):
        row = [of for of in grades if of.submission == folder]
        marks = ["+" if of.passed else "." if of.remark == NOT_HANDED_IN else "-" for of in row]
        table.add_row(shown(folder), shown(row[0].learner), *marks, str(marks.count("+")))
    out.print(table)
    for of in grades:
        if not of.passed and of.remark != NOT_HANDED_IN:
            remark = " ".join(of.remark.splitlines()[:2])  # the table of grades has the rest
            words = f"{shown(of.submission)}, {numbers[of.exercise]} {of.exercise}: {shown(remark)}"
            out.print(words, soft_wrap=True)
    for line in remarks(grades):
        err.print(f"note: {line}", style="yellow", soft_wrap=True)
    typer.echo(shown(str(output)))


@workshop.command("wheels", cls=Command)
def wheels(
    folder: Annotated[Path, typer.Argument(help="A new folder for the wheels, some gigabytes.")],
    torch_index: Annotated[
        str, typer.Option(help="URL of an index that pip looks in, too, such as one of PyTorch's CPU wheels.")
    ] = "",
) -> None:
    """Collect the wheels of labkit and of all that it needs, to install it without a network."""
    from labkit.notebooks.workshop.wheels import collect_wheels

    err.print("pip collects the wheels; some minutes", style="dim")
    typer.echo(shown(str(collect_wheels(folder, torch_index=torch_index) / "README.txt")))


def _opened(name: str, folder: Path) -> tuple[Exercise, Learner]:
    from labkit.notebooks.workshop.exercises import find_exercise
    from labkit.notebooks.workshop.learner import Learner

    return find_exercise(name), Learner(folder)


def _print(report: Report) -> None:
    for remark in report.remarks:
        out.print(
            "right  " if remark.right else "not yet", style="bold green" if remark.right else "bold yellow", end=" "
        )
        out.print(remark.text)
