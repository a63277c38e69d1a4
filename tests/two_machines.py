"""Two machines on this one: network namespaces with a cable between them, and a host name for each."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What runs under `prefix` sees only this machine's network, and its name."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]


def missing() -> str | None:
    """Why there can't be two machines here."""
    if absent := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        return f"{' and '.join(absent)} not found: apt-get install iproute2 util-linux"
    try:
        with two_machines() as machines:
            for machine in machines:
                _must(*machine.prefix, "true")
    except OSError as error:
        return f"no network namespaces here, which need root: {error}"
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Gone at the end, with all that runs there cut off. Raises OSError where the system doesn't let us."""
    machines = tuple(Machine(f"labkit-{os.getpid()}-{each}", f"10.77.0.{each}") for each in (1, 2))
    ends = [f"lk{os.getpid() % 100_000}-{each}" for each in (1, 2)]  # a name has at most 15 characters
    try:
        for machine in machines:
            _must("ip", "netns", "add", machine.name)
        first, second = (f"{end} netns {machine.name}".split() for end, machine in zip(ends, machines, strict=True))
        _must("ip", "link", "add", *first, "type", "veth", "peer", "name", *second)
        for machine, end in zip(machines, ends, strict=True):
            _must("ip", "-n", machine.name, "address", "add", f"{machine.address}/24", "dev", end)
            for device in (end, "lo"):
                _must("ip", "-n", machine.name, "link", "set", device, "up")
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            _run("ip", "netns", "del", machine.name)


def _must(*command: str) -> None:
    done = _run(*command)
    if done.returncode:
        raise OSError(done.stderr.strip())


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
