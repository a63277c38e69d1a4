"""The arguments that `labkit launch` passes to torchrun, and the environment of the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.launcher.rendezvous import Rendezvous, loopback
from labkit.launcher.shares import PIN, threads_each
from labkit.launcher.start import START_TIMEOUT
from labkit.system.errors import UserError
from labkit.system.home import expanded

LOOPBACK = "labkit-loopback"  # the rendezvous of one machine, which labkit.launcher.agent registers with torchrun
START = ("-P", "-m", "labkit.launcher.start_rank")
FOLDERS = "labkit-launch-"  # prefix of the temporary folders of runs
INTERFACE = "GLOO_SOCKET_IFNAME"
SHUTDOWN_S = 5  # from Ctrl-C, or another rank's failure, until a rank that doesn't end is killed


@dataclass(frozen=True)
class World:
    """The ranks of a run and its machines: `pp` stages of `tp` ranks each, spread evenly over `nodes` machines.

    node_rank: the number of this machine; None leaves the numbers to torchrun's c10d rendezvous.

    Raises ValueError for settings that do not fit together.
    """

    tp: int
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: Rendezvous | None = None
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise UserError(f"got {sizes_as_options(self.tp, self.pp)}, expected at least 1 rank")
        if self.nodes < 1 or self.ranks % self.nodes:
            remedy = "a --tp that --nodes divides" if self.pp == 1 else "--pp times --tp that --nodes divides"
            raise UserError(
                f"got {sizes_as_options(self.tp, self.pp)} on --nodes {self.nodes}, expected the same number of ranks "
                f"on each node: {remedy}"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise UserError(f"got --node-rank {self.node_rank}, expected 0 to {self.nodes - 1}, one for each node")
        if self.nodes > 1 and self.rendezvous is None:
            raise UserError(
                f"got --nodes {self.nodes} without --rendezvous, expected HOST:PORT, an address of node rank 0 and a "
                "free port there"
            )
        if self.nodes > 1 and self.rendezvous is not None:
            self.rendezvous.check_reachable()

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.pp * self.tp

    @property
    def ranks_here(self) -> int:
        return self.ranks // self.nodes


def sizes_as_options(tp_size: int | str, pp_size: int) -> str:
    """The sizes as options of `labkit launch`."""
    return f"--tp {tp_size}" if pp_size == 1 else f"--pp {pp_size} --tp {tp_size}"


def program(command: Sequence[str], *, module: bool = False, no_python: bool = False) -> list[str]:
    """The command line of each rank: a Python script with its arguments, a `module`, or (`no_python`) any program.

    Raises ValueError if the script does not exist.
    """
    if no_python:
        return list(command)
    if module:
        return [sys.executable, "-u", "-m", *command]
    script = expanded(command[0])
    if not script.is_file():
        raise UserError(
            f"got the script {command[0]!r}, and there is no such file; expected: labkit launch --tp N -- script.py"
        )
    return [sys.executable, "-u", str(script), *command[1:]]


def torchrun_arguments(world: World, command: Sequence[str], timeout_s: float) -> list[str]:
    """The arguments of `python -m torch.distributed.run`. timeout_s: how long node rank 0 waits for the others."""
    if world.rendezvous is None:
        where = ["--nnodes=1", f"--rdzv-backend={LOOPBACK}", "--rdzv-id=labkit", "--local-addr=127.0.0.1"]
    elif world.node_rank is None:  # else c10d would resolve the machine's name, which may have no address
        where = [
            f"--nnodes={world.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={world.rendezvous}",
            "--rdzv-id=labkit",
            f"--rdzv-conf=join_timeout={max(1, round(timeout_s))},is_host={int(world.rendezvous.is_here)}",
            *(f"--local-addr={address}" for address in [world.rendezvous.own_address()] if address),
        ]
    else:
        where = [  # c10d numbers machines by address; the static rendezvous keeps the node rank
            f"--nnodes={world.nodes}",
            f"--node-rank={world.node_rank}",
            f"--master-addr={world.rendezvous.host}",
            f"--master-port={world.rendezvous.port}",
            f"--rdzv-conf=timeout={max(1, round(timeout_s))}",
        ]
    return [*where, f"--nproc-per-node={world.ranks_here}", "--no-python", sys.executable, *START, *command]


def environment(
    world: World,
    threads: int | None,
    pin: bool,
    base: Mapping[str, str] = os.environ,
    *,
    start_timeout_s: float | None = None,
) -> dict[str, str]:
    """`base` with the variables that the ranks need. Variables of `base` override defaults; arguments override both.

    On one machine gloo listens only on the loopback interface. NCCL takes its interface from NCCL_SOCKET_IFNAME, which
    is left to the user.
    """
    interface = loopback() if world.rendezvous is None else world.rendezvous.interface()
    defaults = {
        "OMP_NUM_THREADS": str(threads_each(world.ranks_here)),
        "PYTHONFAULTHANDLER": "1",  # a crash says where
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    if interface is not None:  # else gloo takes the address of the machine's name, which on many machines is 127.0.1.1
        defaults[INTERFACE] = interface
    overrides = ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | ({} if pin else {PIN: "0"})
    if start_timeout_s is not None:
        overrides[START_TIMEOUT] = str(start_timeout_s)
    return defaults | dict(base) | overrides
