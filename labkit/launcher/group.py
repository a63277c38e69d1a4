"""The process group of a run's ranks, from the environment that the launcher has set."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from labkit.launcher.command import INTERFACE, sizes_as_options
from labkit.launcher.joining import say_process
from labkit.launcher.meeting import TORCHRUN, meet
from labkit.launcher.rendezvous import loopback
from labkit.launcher.shares import pin_this_rank
from labkit.launcher.start import start_timeout
from labkit.system.errors import RunError, UserError

TIMEOUT_S = 600.0
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with GPUs, messages about the run stay on the CPU


def ensure_process_group(
    device_type: str = "cpu",
    *,
    tp_size: int | None = None,
    pp_size: int = 1,
    timeout_s: float = TIMEOUT_S,
    start_timeout_s: float | None = None,
    init_method: str = "env://",
) -> None:
    """Initialises torch.distributed: with gloo on "cpu"; on "cuda" with NCCL, and with gloo for CPU tensors.

    An existing group is kept. A new one holds all processes that torchrun has started (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT) and is destroyed when the process ends; its collectives raise after `timeout_s`. On a CPU each rank
    then keeps to its share of the processors (`labkit.launcher.shares`). If all ranks are on one machine, gloo listens
    only on the loopback interface, unless GLOO_SOCKET_IFNAME names another one.

    start_timeout_s: how long the ranks wait for each other here; by default LABKIT_START_TIMEOUT, else 60 s.

    Raises ValueError outside of torchrun, if pp_size * tp_size is not the number of processes, or if the rank has no
    GPU; RunError with the ranks that have not come in time; RankFailedError with the reason of a rank that failed
    before it came.
    """
    if device_type not in BACKENDS:
        raise UserError(f"got device_type {device_type!r}, expected one of {', '.join(BACKENDS)}")
    if dist.is_initialized():
        check_world(tp_size, pp_size, dist.get_world_size())
        return
    if missing := [name for name in TORCHRUN if name not in os.environ and init_method == "env://"]:
        processes = "several processes" if tp_size is None else f"{pp_size * tp_size} processes"
        size = "N" if tp_size is None else pp_size * tp_size
        options = sizes_as_options(tp_size or "N", pp_size)
        request = "tensor parallelism" if tp_size is None else _sizes(tp_size, pp_size)
        raise UserError(
            f"{request} needs {processes}, and this one was started alone ({', '.join(missing)} not set): start it by "
            f"labkit launch {options} -- script.py, by torchrun --nproc-per-node {size} script.py, or from a "
            f"notebook by labkit.launch(function, {_sizes(tp_size or 'N', pp_size)})"
        )
    check_world(tp_size, pp_size, int(os.environ["WORLD_SIZE"]))
    if device_type == "cuda":
        _take_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        pin_this_rank()
    _keep_to_this_machine()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _met(init_method, rank, ranks, start_timeout() if start_timeout_s is None else start_timeout_s)
    limit = timedelta(seconds=timeout_s)
    store.set_timeout(limit)
    dist.init_process_group(
        BACKENDS[device_type], store=dist.PrefixStore("group", store), rank=rank, world_size=ranks, timeout=limit
    )
    say_process()
    atexit.register(_leave)


def _keep_to_this_machine() -> None:
    """Has gloo use the loopback interface instead of the interface of the machine's name."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] and (interface := loopback()):
        os.environ.setdefault(INTERFACE, interface)


def _met(init_method: str, rank: int, ranks: int, timeout_s: float) -> dist.Store:
    """The store of the run, once all ranks have connected to it."""
    try:
        store, _, _ = next(dist.rendezvous(init_method, rank, ranks, timeout=timedelta(seconds=timeout_s)))
    except dist.DistError as error:
        raise RunError(
            f"rank {rank} did not reach the store of the run within {timeout_s:g} s ({error}); check that rank 0 and "
            "the launcher that started it are running, or set a longer limit: labkit launch --start-timeout"
        ) from None
    meet(store, rank, ranks, timeout_s)
    return store


def check_world(tp_size: int | None, pp_size: int, world_size: int) -> None:
    """Raises ValueError unless the number of processes is pp_size * tp_size. tp_size None accepts any number."""
    if tp_size is None or (processes := pp_size * tp_size) == world_size:
        return
    options = sizes_as_options(tp_size, pp_size)
    remedy = f"pass tp_size={world_size}" if pp_size == 1 else f"pass sizes whose product is {world_size}"
    raise UserError(
        f"got {_sizes(tp_size, pp_size)} in a run of {world_size} process{'es' * (world_size > 1)}, "
        f"expected {processes}: {remedy}, or start {processes} processes (labkit launch {options} -- script.py)"
    )


def _sizes(tp_size: int | str, pp_size: int) -> str:
    """The sizes as arguments in Python."""
    return f"tp_size={tp_size}" if pp_size == 1 else f"pp_size={pp_size}, tp_size={tp_size}"


def _take_gpu(local_rank: int) -> None:
    """Makes the rank's own GPU the current one. Raises ValueError if the machine has too few."""
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"rank {os.environ['RANK']} is number {local_rank} on a machine with {count} GPUs; start as many ranks as "
            "it has GPUs, or more machines, or run on the CPU with impl='cpp'"
        )
    torch.cuda.set_device(local_rank)


def _leave() -> None:
    """Destroys the group when the process ends, unless an error ends it."""
    failed = hasattr(sys, "last_value")  # then other ranks may wait in a collective, and NCCL would wait for it here
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
