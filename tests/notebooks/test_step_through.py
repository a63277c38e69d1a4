"""The buttons of notebook 02 step through the regions, before the first run and after it."""

from pathlib import Path
from typing import Any

import pytest
from helpers.studies.drawn import title
from helpers.studies.kernel_studies import study
from ipywidgets import Button, HBox, Label

from labkit.stages import FUSED_REGIONS
from labkit.widgets import bench as bench_module
from labkit.widgets import benches, live
from labkit.widgets.bench import NOT_YET
from labkit.widgets.benches import KernelBench

REGIONS = len(FUSED_REGIONS)


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The buttons and the label that a live bench shows."""
    rows: list[HBox] = []
    monkeypatch.chdir(tmp_path)
    for module in (bench_module, benches):
        monkeypatch.setattr(module, "is_live", lambda: True)
    monkeypatch.setattr(benches, "display", rows.append)
    monkeypatch.setattr(live, "display", lambda *_, **__: None)
    monkeypatch.setattr(KernelBench, "study", staticmethod(lambda **_: study()))
    return rows


def walked(row: list[Any], bench: KernelBench) -> list[tuple[str, Any, bool, bool]]:
    """Presses "next" until the last region, and "previous" back to the first. Returns what is shown at each."""
    previous, following, label = row[0].children
    assert isinstance(previous, Button)
    assert isinstance(label, Label)
    states = []
    for button in (None, *[following] * (REGIONS - 1), *[previous] * (REGIONS - 1)):
        if button:
            button.click()
        contents = tuple(view.slot._content for view in bench._views)
        states.append((label.value, contents, previous.disabled, following.disabled))
    return states


def test_buttons_step_before_a_run_and_the_figures_after_it_agree_with_the_label(row: list[Any]) -> None:
    bench = KernelBench()
    bench.step_through()
    places = [*range(REGIONS), *reversed(range(REGIONS - 1))]
    labels = [f"region {place + 1} of {REGIONS}: {FUSED_REGIONS[place]}" for place in places]
    ends = [(place == 0, place == REGIONS - 1) for place in places]
    before = walked(row, bench)
    assert [state[0] for state in before] == labels
    assert [state[2:] for state in before] == ends
    assert {contents for _, contents, *_ in before} == {(NOT_YET, NOT_YET)}

    row[0].children[1].click()
    bench._measure(dict(bench.settings), lambda *_: None)
    assert row[0].children[2].value == labels[1]
    assert title(bench._views[0].slot._content) == f"Region {FUSED_REGIONS[1]}: what is fused"
    row[0].children[0].click()
    after = walked(row, bench)
    assert [state[0] for state in after] == labels
    titles = [title(contents[0]) for _, contents, *_ in after]
    assert titles == [f"Region {FUSED_REGIONS[place]}: what is fused" for place in places]
    in_color = [sum(bar.marker.opacity == 1 for bar in contents[1].data) // 2 for _, contents, *_ in after]
    assert in_color == [place + 1 for place in places]


def test_in_batch_every_region_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelBench, "study", staticmethod(lambda **_: study()))
    bench = KernelBench()
    bench.run()
    bench.step_through()
    titles = [title(view.slot._content) for view in bench._views]
    assert titles[:-1] == [f"Region {region}: what is fused" for region in FUSED_REGIONS]
    assert len(titles) == REGIONS + 1
