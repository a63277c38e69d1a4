"""Ways to read weights from memory, by name: software prefetches into the first (l1) or second (l2) level of the
caches, some KiB ahead, or none. A way changes no result. `reading.h` has them in the same order.

Environment: `LABKIT_READ` names the one way that every engine then uses, to compare it with the others.
"""

import os

from labkit.system.errors import UserError

READINGS = ("none", "l1-2k", "l1-6k", "l2-2k", "l2-6k")
USUAL = -1  # for what nobody times


def wanted_reading() -> int | None:
    """The way that `LABKIT_READ` asks for, as an index into READINGS; None where it is not set.

    Raises ValueError for a name that there is not.
    """
    name = os.environ.get("LABKIT_READ")
    if name is None:
        return None
    if name not in READINGS:
        raise UserError(f"LABKIT_READ is {name!r}; expected one of {', '.join(READINGS)}, or leave it unset")
    return READINGS.index(name)
