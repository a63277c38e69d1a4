"""Study of tensor parallelism: what its capture may do to its measurements."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.studies.comparisons import comparison

from labkit.nsys.capture.result import CaptureError
from labkit.studies import parallel
from labkit.system.errors import UserError


@pytest.mark.parametrize("error", [CaptureError("no profiler"), UserError("no program labkit")])
def test_a_capture_that_fails_leaves_the_measurements(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, progress: Any, **options: Any) -> SimpleNamespace:
        progress(1, 1, "")
        return SimpleNamespace(comparison=lambda *_: comparison())

    def refused(*_: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(parallel, "take_turns", measured)
    monkeypatch.setattr(parallel, "capture_ranks", refused)
    study = parallel.study_parallel(output=tmp_path)
    assert study.comparisons == (comparison(),)
    assert study.remarks == (f"the ranks could not be captured: {error}",)
