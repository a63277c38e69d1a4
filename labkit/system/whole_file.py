"""Files that are there whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to: it becomes `target` at the end, and is removed where anything goes wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=f".tmp{target.suffix}")
    os.close(handle)
    path = Path(name)
    try:
        yield path
        path.chmod(0o644)  # temporary files are their owner's alone
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_whole(target: Path, text: str) -> None:
    """Write `text` to `target`: nobody ever sees half of it."""
    with whole_file(target) as path:
        path.write_text(text, encoding="utf-8")
