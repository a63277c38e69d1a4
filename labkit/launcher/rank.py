"""One rank of `labkit.launch`: `-m labkit.launcher.rank FOLDER PARENT`. torchrun's variables give its rank.

FOLDER holds the pickled sys.path and call, and receives the result or the error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from labkit.launcher.rank_process import CALL, ERROR, MET, RESULT, WAITING
from labkit.launcher.shares import PIN, pin_this_rank
from labkit.system.errors import UserTypeError
from labkit.system.lifetime import end_with_parent
from labkit.system.whole_file import whole_file, write_whole

POLL_S = 0.05


def main(folder: Path, parent: int) -> None:
    """Runs the call in the group of all ranks. An error of the call is written to a file and ends the process."""
    end_with_parent(parent)
    if sys.version_info >= (3, 14):  # a crash says where
        faulthandler.enable(c_stack=False)  # its 40 lines would push Python's own out of the error message
    else:
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    pin_this_rank()
    os.environ[PIN] = "0"
    rank = int(os.environ["RANK"])
    try:
        _run(folder, folder / RESULT.format(rank))
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame
        record = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(type(error), error, frames)),
            "at": time.monotonic(),
        }
        write_whole(folder / ERROR.format(rank), json.dumps(record))
        raise SystemExit(1) from error


def _run(folder: Path, target: Path) -> None:
    with (folder / CALL).open("rb") as file:
        sys.path[:] = pickle.load(file)
        call: Any = pickle.load(file)
    import cloudpickle
    import torch

    from labkit.launcher.group import ensure_process_group

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / WAITING.format(rank)).touch()
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    ensure_process_group(device, tp_size=ranks, init_method=f"file://{folder / 'store'}")
    (folder / MET.format(rank)).touch()
    result = call()
    try:
        pickled = cloudpickle.dumps(result)
    except (TypeError, pickle.PicklingError) as error:
        raise UserTypeError(
            f"the result, of type {type(result).__name__}, cannot be sent back ({error}); return tensors or plain data"
        ) from None
    with whole_file(target) as path:
        path.write_bytes(pickled)
    while not all((folder / RESULT.format(other)).exists() for other in range(ranks)):
        time.sleep(POLL_S)  # another rank may still be connecting to this one, and would fail if it left


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
