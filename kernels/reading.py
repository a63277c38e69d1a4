"""Ways to read weights from memory: with software prefetches into the first (l1) or second (l2) cache level, some KiB
ahead, or with none. A way changes no result. `reading.h` has them in the same order.

Environment: `LABKIT_READ` names one way for all engines, for comparisons between ways.
"""

import os

from labkit.system.errors import UserError

from .build import same_in_cpp

READINGS = ("none", "l1-2k", "l1-6k", "l2-2k", "l2-6k")
same_in_cpp({"kReadingCount": len(READINGS)})
USUAL = -1  # the default way, for calls whose ways are not compared


def wanted_reading() -> int | None:
    """The way in `LABKIT_READ`, as an index into READINGS; None if it is not set.

    Raises ValueError for an unknown name.
    """
    name = os.environ.get("LABKIT_READ")
    if name is None:
        return None
    if name not in READINGS:
        raise UserError(f"LABKIT_READ is {name!r}; expected one of {', '.join(READINGS)}, or leave it unset")
    return READINGS.index(name)
