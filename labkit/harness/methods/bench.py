"""`bench_methods`: every method on every batch size, each cell in processes of its own, and kept when it is done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.harness.compare.baselines import check_name
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec, prepare
from labkit.harness.compare.providers import PROVIDED, provider_of
from labkit.harness.compare.sides import OutOfBudgetError
from labkit.harness.compare.versus import comparison_case
from labkit.harness.environment import Environment, read_environment
from labkit.harness.methods.cell import MethodCell
from labkit.harness.methods.grid import MethodGrid
from labkit.harness.quiet import NotQuietError
from labkit.harness.records import Case, Measurement
from labkit.harness.results import load_records, save_lines
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import RunError, UserError
from labkit.system.output_folder import check_output_folder
from labkit.system.owned_folder import owned_folder
from labkit.system.progress import Progress, unheard

METHODS = ("hf-eager", "accelerate", "accelerate-int8", "fused", "fused-tp2", "fused-int8", "fused-streamed")
ALIASES = {"accelerate-int8": "bitsandbytes-int8", "streamed": "fused-streamed"}  # the articles' names


@dataclass(frozen=True)
class Asked:
    """What all cells of a file have in common. The threads of the case are shared out among a method's ranks."""

    case: Case
    cycles: int
    seed: int
    wait_quiet_s: float | None
    environment: Environment

    def of_batch(self, batch: int) -> Case:
        return self.case.model_copy(update={"batch": batch})

    def cell(
        self, method: str, batch: int, *, measured: Measurement | None = None, oom: str = "", refused: str = ""
    ) -> MethodCell:
        return MethodCell(
            method=method,
            case=self.of_batch(batch),
            cycles=self.cycles,
            seed=self.seed,
            environment=self.environment,
            measured=measured,
            oom=oom,
            refused=refused,
        )

    def differences(self, cell: MethodCell) -> list[str]:
        """Where a cell of a file is another one than would be measured now."""
        asked, found = self.case.model_dump(exclude={"batch"}), cell.case.model_dump(exclude={"batch"})
        for each, values in ((self, asked), (cell, found)):
            values |= {"cycles": each.cycles, "seed": each.seed, "machine": each.environment.machine}
        return [f"{name} {found[name]!r} instead of {asked[name]!r}" for name in asked if asked[name] != found[name]]


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
    cycles: int = 6,
    seed: int = 0,
    wait_quiet_s: float | None = None,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> MethodGrid:
    """Measure each of the methods on each batch size: `cycles` calls that generate `new` greedy tokens behind random
    prompts of `prompt` tokens, in processes of their own, with `memory_gb` GB of memory for each (None: no limit).

    methods: names of sides, with "-tp2" or "-pp2" behind those that are to run on two ranks; "accelerate-int8" is
    bitsandbytes'. threads: of all ranks together; None: as many as torch would use. scratch: where models are written
    for the methods that read files of their own, as long as such a method is measured; None: in the folder for
    temporary files.

    output: a file of JSON lines that is written anew, whole, after each cell. What it has already is not measured
    again, but for cells that were refused, or measured while other programs took the processors. Cells of other methods
    and batch sizes stay in it.

    A method that does not fit into its memory, or cannot run the case, is a cell that says so. UserError: a name or
    size that cannot be, or a file of another case. NotQuietError: the machine did not become quiet.
    """
    batches, methods = tuple(dict.fromkeys(batches)), tuple(dict.fromkeys(methods))
    case = comparison_case(
        model=model, dtype=dtype, batch=1, prompt=prompt, new=new, threads=threads, memory_gb=memory_gb
    )
    _check(methods, batches)
    schedule = Schedule(rounds=cycles, seed=seed, stages=False, wait_quiet_s=wait_quiet_s)
    case = prepare((), case, schedule).case
    asked = Asked(case, cycles, seed, wait_quiet_s, read_environment(case.threads))
    file = Path(output)
    kept = _kept(file, asked)
    check_output_folder(file.parent)
    where = None if scratch is None else check_output_folder(scratch, what="models", option=setting("scratch"))
    follow, total = progress or unheard, len(methods) * len(batches)
    done = 0
    for method in methods:
        with owned_folder("labkit-methods-", where or Path(tempfile.gettempdir())) as folder:
            for batch in batches:
                found = kept.get((method, batch))
                if found is None or not found.final:
                    label = f"{method}, batch {batch}"
                    kept[method, batch] = _measured(asked, method, batch, folder, _within(follow, done, total, label))
                    save_lines(file, kept.values())
                done += 1
    follow(total, total, "done")
    return MethodGrid(tuple(kept[method, batch] for method in methods for batch in batches))


def side_of(method: str, threads: int) -> SideSpec:
    """The side that a method is, with `threads` threads in all."""
    side = SideSpec.named(method, threads)
    return replace(side, name=ALIASES.get(side.name, side.name))


def _check(methods: Sequence[str], batches: Sequence[int]) -> None:
    if not methods or not batches:
        raise UserError(f"got methods {list(methods)} and batches {list(batches)}; expected at least one of each")
    for batch in batches:
        check_numbers(batch=batch)
    for method in methods:
        name = side_of(method, 1).name
        if (provider := provider_of(name)) is not None:
            provider.check_name(name)
        else:
            check_name(name, others=(*PROVIDED, *ALIASES))


def _kept(file: Path, asked: Asked) -> dict[tuple[str, int], MethodCell]:
    """The cells of a file that is there already. UserError for one of something else."""
    records = load_records(file) if file.exists() else []
    kept = {record.place: record for record in records if isinstance(record, MethodCell)}
    if len(kept) < len(records):
        raise UserError(f"got {file}, which holds other records too; expected a file of this command, or a new one")
    for cell in kept.values():
        if differences := asked.differences(cell):
            raise UserError(
                f"got {file} with cells of another case ({'; '.join(differences)}); name another file, or ask for the "
                f"same case ({setting('output')})"
            )
    return kept


def _measured(asked: Asked, method: str, batch: int, scratch: Path, progress: Progress) -> MethodCell:
    """A cell, whatever comes of it."""
    schedule = Schedule(
        rounds=asked.cycles, seed=asked.seed, stages=False, wait_quiet_s=asked.wait_quiet_s, scratch=scratch
    )
    side = side_of(method, asked.case.threads)
    try:
        (found,) = take_turns([side], asked.of_batch(batch), schedule, progress=progress).sides
        return asked.cell(method, batch, measured=found)
    except OutOfBudgetError as error:
        return asked.cell(method, batch, oom=str(error))
    except NotQuietError:
        raise
    except (UserError, RunError) as error:
        return asked.cell(method, batch, refused=str(error))


def _within(progress: Progress, done: int, total: int, label: str) -> Progress:
    """The progress of one cell, as a part of that of all of them."""

    def follow(part: float, of: float, what: str) -> None:
        progress(done + part / max(of, 1), total, f"{label}: {what}")

    return follow
