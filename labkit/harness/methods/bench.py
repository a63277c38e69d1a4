"""`bench_methods` measures all methods on all batch sizes. Each cell has its own processes and is saved at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.loader import loader_at
from labkit.harness.compare.plan import Schedule, SideSpec, prepare
from labkit.harness.compare.sampling import Turns
from labkit.harness.compare.side_process import OutOfBudgetError
from labkit.harness.compare.sides import side_row
from labkit.harness.environment import Environment, read_environment
from labkit.harness.methods.cell import MethodCell
from labkit.harness.methods.grid import MethodGrid
from labkit.harness.quiet import NotQuietError
from labkit.harness.results import load_records, save_lines
from labkit.harness.runs import Case
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.output_folder import check_output_folder
from labkit.system.owned_folder import owned_folder
from labkit.system.progress import Progress, part_of, unheard
from labkit.system.whole_file import check_output_file

METHODS = ("hf-eager", "accelerate", "accelerate-int8", "fused", "fused-tp2", "fused-int8", "fused-streamed")
ROUNDS = 6
ALIASES = {"accelerate-int8": "bitsandbytes-int8", "streamed": "fused-streamed"}  # the articles' names


@dataclass(frozen=True)
class GridSettings:
    """Settings that all cells of a file share. A method's ranks share the threads of the case."""

    case: Case
    rounds: int
    seed: int
    environment: Environment

    def of_batch(self, batch: int) -> Case:
        return self.case.model_copy(update={"batch": batch})

    def cell(
        self, method: str, batch: int, *, turns: Turns | None = None, oom: str = "", refused: str = ""
    ) -> MethodCell:
        return MethodCell(
            method=method,
            case=self.of_batch(batch),
            cycles=self.rounds,
            seed=self.seed,
            environment=self.environment,
            measured=None if turns is None else turns.sides[0],
            why_rounds="" if turns is None else turns.why_rounds,
            dropped_pairs=0 if turns is None else turns.dropped_pairs,
            oom=oom,
            refused=refused,
        )

    def differences(self, cell: MethodCell) -> list[str]:
        """Differences between a cell of a file and these settings, in words."""
        expected, got = self.case.model_dump(exclude={"batch"}), cell.case.model_dump(exclude={"batch"})
        for values, rounds, owner in ((expected, self.rounds, self), (got, cell.cycles, cell)):
            values |= {"rounds": rounds, "seed": owner.seed, "machine": owner.environment.machine}
        return [
            f"{name} {got[name]!r} instead of {expected[name]!r}" for name in expected if expected[name] != got[name]
        ]


def bench_methods(
    model: str,
    *,
    output: str | os.PathLike[str],
    methods: Sequence[str] = METHODS,
    batches: Sequence[int] = (1,),
    dtype: str = "float32",
    prompt: int = 128,
    new: int = 100,
    memory_gb: float | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    seed: int = 0,
    wait_quiet_s: float | None = None,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    cycles: int | None = None,
) -> MethodGrid:
    """Measures each method on each batch size: the time of a call that generates `new` greedy tokens after random
    prompts of `prompt` tokens. Each cell runs in processes of its own, with `memory_gb` GB of memory (None: no limit).

    A method that can pause is measured in `rounds` epochs (None: 6), between which its weights get new memory. An epoch
    has one call or a few, in turns of a few tokens with a probe of the memory next to each. With a memory limit, and
    where a method cannot pause, `rounds` whole calls are timed, and the cell says why.

    methods: names of sides. An ending "-tp2" or "-pp2" runs a side on two ranks. "accelerate-int8" is bitsandbytes'.
    threads: of all ranks together; None: the engine's own number (`team_size`).
    scratch: folder for the files of methods that read their own, while such a method is measured; None: the folder for
    temporary files.
    output: a file of JSON lines that is rewritten whole after each cell. Its cells are not measured again, except cells
    that were refused, or measured while other programs took the processors. Cells of other methods and batch sizes stay
    in it.

    cycles: the former name of `rounds`.

    A method that does not fit into its memory, or cannot run the case, is a cell with the reason. UserError: an
    impossible name or size, or a file of another case. NotQuietError: the machine did not become quiet.
    """
    if rounds is not None and cycles is not None:
        raise UserError(f"got rounds = {rounds} and cycles = {cycles}; expected one of them: cycles is its former name")
    rounds = next((count for count in (rounds, cycles) if count is not None), ROUNDS)
    file = expanded(output)
    check_output_file(file)
    batches, methods = tuple(dict.fromkeys(batches)), tuple(dict.fromkeys(methods))
    case = comparison_case(
        model=model, dtype=dtype, batch=1, prompt=prompt, new=new, threads=threads, memory_gb=memory_gb
    )
    _check(methods, batches)
    # The articles' time is that of whole calls, so an epoch has steps at every length of the context.
    schedule = Schedule(rounds=rounds, whole=True, seed=seed, stages=False, wait_quiet_s=wait_quiet_s)
    case = prepare((), case, schedule).case
    settings = GridSettings(case, rounds, seed, read_environment(case.threads))
    cells = _existing_cells(file, settings)
    check_output_folder(file.parent)
    scratch_root = None if scratch is None else check_output_folder(scratch, what="models", option=setting("scratch"))
    follow, total = progress or unheard, len(methods) * len(batches)
    done = 0
    for method in methods:
        with owned_folder("labkit-methods-", scratch_root or Path(tempfile.gettempdir())) as folder:
            for batch in batches:
                cell = cells.get((method, batch))
                if cell is None or not cell.final:
                    of_cell = part_of(follow, done, done + 1, total, f"{method}, batch {batch}: ")
                    cells[method, batch] = _measured(
                        settings, method, batch, replace(schedule, scratch=folder), of_cell
                    )
                    save_lines(file, cells.values())
                done += 1
    follow(total, total, "done")
    return MethodGrid(tuple(cells[method, batch] for method in methods for batch in batches))


def side_of(method: str, threads: int) -> SideSpec:
    """The side of a method, with `threads` threads in all."""
    side = SideSpec.named(method, threads)
    return replace(side, name=ALIASES.get(side.name, side.name))


def _check(methods: Sequence[str], batches: Sequence[int]) -> None:
    if not methods or not batches:
        raise UserError(f"got methods {list(methods)} and batches {list(batches)}; expected at least one of each")
    for batch in batches:
        check_numbers(batch=batch)
    for method in methods:
        name = side_of(method, 1).name
        loader_at(side_row(name, others=ALIASES).loader).check_name(name)


def _existing_cells(file: Path, settings: GridSettings) -> dict[tuple[str, int], MethodCell]:
    """The cells of an existing file; none without a file. UserError for a file with other records."""
    records = load_records(file) if file.exists() else []
    cells = {record.place: record for record in records if isinstance(record, MethodCell)}
    if len(cells) < len(records):
        raise UserError(f"got {file}, which holds other records too; expected a file of this command, or a new one")
    for cell in cells.values():
        if differences := settings.differences(cell):
            raise UserError(
                f"got {file} with cells of another case ({'; '.join(differences)}); name another file, or measure the "
                f"same case ({setting('output')})"
            )
    return cells


def _measured(settings: GridSettings, method: str, batch: int, schedule: Schedule, progress: Progress) -> MethodCell:
    """Measures a cell; a failure becomes a cell with the reason. KeyboardInterrupt also where some epochs are done: a
    cell has all of them or none.
    """
    side = side_of(method, settings.case.threads)
    try:
        turns = take_turns([side], settings.of_batch(batch), schedule, progress=progress)
        if turns.interrupted:
            raise KeyboardInterrupt
        return settings.cell(method, batch, turns=turns)
    except OutOfBudgetError as error:
        return settings.cell(method, batch, oom=str(error))
    except NotQuietError:
        raise
    except (UserError, RunError) as error:
        return settings.cell(method, batch, refused=str(error))
