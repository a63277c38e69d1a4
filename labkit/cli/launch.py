"""`labkit launch`: a thin call of torchrun."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from labkit.system.errors import RunError, UserError
from labkit.system.terminal import terminal

err = terminal(stderr=True, markup=False, highlight=False)


def launch(
    command: Annotated[list[str], typer.Argument(help="After --: a script and its arguments.")],
    tp: Annotated[int | None, typer.Option(help="Ranks that share each layer: the tp_size of the script.")] = None,
    pp: Annotated[int | None, typer.Option(help="Stages that divide the layers: the pp_size of the script.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines that share the ranks.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="Number of this machine, from 0; by default torchrun decides.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT, the same on every machine: an address of node rank 0, or of any without --node-rank."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each rank; by default OMP_NUM_THREADS, else its share.", min=1)
    ] = None,
    pin: Annotated[bool, typer.Option(help="Keep each rank on its own processors.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other machines.")] = 300,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds that the ranks may take to start and to meet; by default 60.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="The script is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="The script is a program, not Python.")] = False,
) -> None:
    """Start a script on several ranks, on this machine or on several, with torchrun.

    There are --pp times --tp ranks in all. The ranks of one stage have consecutive numbers.
    """
    from labkit.launcher.command import World, environment, program, torchrun_arguments
    from labkit.launcher.rendezvous import Rendezvous
    from labkit.launcher.start import start_timeout as check_start_timeout

    if tp is None and pp is None:
        raise UserError("got no number of ranks; expected --tp N, --pp N or both, the script's tp_size and pp_size")
    meeting = None if rendezvous is None else Rendezvous.parse(rendezvous)
    world = World(1 if tp is None else tp, nodes, node_rank, meeting, 1 if pp is None else pp)
    ranks = program(command, module=module, no_python=no_python)
    arguments = torchrun_arguments(world, ranks, timeout)
    variables = environment(world, threads, pin, start_timeout_s=start_timeout)
    check_start_timeout(variables)
    if world.ranks_here > (cores := len(os.sched_getaffinity(0))):
        err.print(f"note: {world.ranks_here} ranks share {cores} cores; {cores} would be faster", style="yellow")
    if meeting is not None and (node_rank == 0 or (node_rank is None and meeting.is_here)):
        meeting.check_here()
        if nodes > 1:
            err.print(f"{nodes} nodes: waiting for the others at {meeting}")
    elif meeting is not None and node_rank is not None:
        try:
            meeting.wait_until_open(timeout, lambda line: err.print(line))
        except TimeoutError as late:
            raise RunError(str(late)) from None
    sys.stdout.flush()
    agent = [sys.executable, "-P", "-m", "labkit.launcher.agent", *arguments]
    os.execve(sys.executable, agent, variables)
