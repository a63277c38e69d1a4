"""A bench with controls, without a kernel: it keeps each result, and says which part was not measured."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.notebooks.notebook_runs import SETTINGS
from helpers.studies import kernel_studies
from helpers.studies.comparisons import comparison

from labkit import figures
from labkit.harness.comparison import Comparison
from labkit.studies.last import Last, read_last
from labkit.system.output_folder import RUNS
from labkit.system.progress import unheard
from labkit.widgets import Workbench, live
from labkit.widgets.bench import KEPT, NOT_YET
from labkit.widgets.benches import KernelBench


@pytest.fixture
def live_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each new bench controls, and displays nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labkit.widgets.bench.is_live", lambda: True)
    monkeypatch.setattr(live, "display", lambda *_, **__: SimpleNamespace(update=lambda *_, **__: None))


@pytest.mark.usefixtures("live_page")
def test_a_figure_that_raises_does_not_lose_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workbench, "study", staticmethod(lambda **_: comparison()))
    bench = Workbench(**SETTINGS)
    bench.view(lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench._measure(SETTINGS, unheard)
    last: Last[Comparison] | None = read_last(Comparison, "Workbench", RUNS)
    assert last
    assert last.result == comparison()


@pytest.mark.usefixtures("live_page")
def test_a_stopped_study_says_so_and_a_view_names_the_part_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = replace(kernel_studies.study(), ladder=None)
    monkeypatch.setattr(KernelBench, "study", staticmethod(lambda **_: stopped))
    bench = KernelBench()
    bench.view(figures.ladder_figure)
    assert bench._controls
    assert bench._views[0].slot._content == NOT_YET
    bench._measure(bench.settings, unheard)
    assert bench._views[0].slot._content == "*The run was stopped before the whole layer was timed; run it again.*"
    assert bench._controls._label.value.startswith(KEPT)
    assert not kernel_studies.study().interrupted
