"""The control groups of this process, with which Linux limits its memory and its processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc/self")
VERSIONS = {"cgroup": 1, "cgroup2": 2}


def own_groups(controller: str, proc: Path = PROC) -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups, its own first and the root last, each with its version of cgroups.

    controller: "memory" or "cpu". A container sees only its own group and those below it.
    """
    own: dict[int, Path] = {}
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                own[1 if controllers else 2] = Path(path)
        for line in (proc / "mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            root, mounted = map(Path, fields.split()[3:5])
            system, _, options = kind.split(" ", 2)
            version = VERSIONS.get(system)
            if version not in own or (version == 1 and controller not in re.split("[ ,]", options)):
                continue
            inside = own[version].relative_to(root) if own[version].is_relative_to(root) else Path()
            for below in (inside, *inside.parents):
                yield mounted / below, version
