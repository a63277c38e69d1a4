"""Two machines simulated on this one: network namespaces with a cable between them, and a host name for each."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A machine. Programs run with `prefix` see only its network and its name."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]


def missing() -> str | None:
    """Reason why this system cannot have two machines, or None."""
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
    """Removes the machines at the end, and cuts off their programs. Raises OSError if the system doesn't allow them."""
    machines = tuple(Machine(f"labkit-{os.getpid()}-{number}", f"10.77.0.{number}") for number in (1, 2))
    ends = [f"lk{os.getpid() % 100_000}-{number}" for number in (1, 2)]  # a name has at most 15 characters
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
    process = _run(*command)
    if process.returncode:
        raise OSError(process.stderr.strip())


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
