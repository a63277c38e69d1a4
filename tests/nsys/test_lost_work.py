"""A report whose CUDA rows end before the first step is refused: nsys lost track of CUDA."""

from pathlib import Path

import pytest
from helpers.traces.nsys_exports import Export, global_pid

from labkit.nsys.capture.command import PROFILER_API, Window
from labkit.nsys.capture.verify import contents, lost

TID = global_pid(7) + 1
STEPS = 3


def report(folder: Path, last_call: int) -> Path:
    """Three steps from 1,000 on, and two launches of kernels: at 100 and at `last_call`."""
    export = Export()
    export.create(0, TID, 1, "labkit")
    for step in range(STEPS):
        export.labelled(1000 + 100 * step, 1090 + 100 * step, TID, "decode/step")
    for correlation, start in enumerate((100, last_call)):
        export.call(start, start + 5, TID, correlation)
        export.kernel(start + 5, start + 9, 7, correlation)
    return export.write(folder / "report.sqlite")


@pytest.mark.parametrize(("last_call", "unseen"), [(990, STEPS), (1000, STEPS - 1), (1250, 0)])
def test_steps_after_the_last_call_are_counted(last_call: int, unseen: int, tmp_path: Path) -> None:
    assert contents(report(tmp_path, last_call)).unseen_steps == unseen


def test_a_report_without_the_gpu_work_of_any_step_is_refused(tmp_path: Path) -> None:
    seen = contents(report(tmp_path, 990))
    assert "all 3 steps began after the last CUDA call" in str(lost([seen], STEPS, Window()))
    assert lost([seen], STEPS, Window(PROFILER_API)) is None
    assert lost([contents(report(tmp_path, 1000))], STEPS, Window()) is None
