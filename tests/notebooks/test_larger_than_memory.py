"""The sixth notebook, run by `labkit run`, and its live controls."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in
from streaming_plans import saved_model, tight_gb
from sweeps import sweep

from labkit.notebooks import RunReport, read_parameters
from labkit.studies.larger_than_memory import BASELINES, load_study
from labkit.system.errors import UserError
from labkit.widgets import StreamingBench
from labkit.widgets.controls import Controls

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "06_larger_than_memory.ipynb"
SETTINGS: dict[str, Any] = {
    "model": "tiny-llama", "precision": "float32", "memory_gb": 0.2, "batches": "1, 2, 100000", "prompt_tokens": 6,
    "new_tokens": 5, "baselines": "other-disk", "rounds": 2, "path": "", "threads": 1,
}  # fmt: skip
FIGURES = 5  # gains by batch, the slots, the memory, the slider, the baselines


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """Report on a model with more layers than slots, in just enough memory for two sequences and three more layers."""
    folder = tmp_path_factory.mktemp("report")
    model = saved_model(folder / "small-llama")
    memory_gb = tight_gb(model, 3.5, prompt=6, new=5, threads=1, precision="float32")
    (folder / "disk").mkdir()
    settings = {"model": str(model), "memory_gb": memory_gb, "path": str(folder / "disk")}
    return run_in(folder, NOTEBOOK, SETTINGS | settings)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = {parameter.name: parameter for parameter in read_parameters(nbformat.read(NOTEBOOK, as_version=4))}
    assert parameters.keys() == SETTINGS.keys()
    assert all(parameter.types and parameter.help for parameter in parameters.values())
    assert parameters["baselines"].default == BASELINES


@sweep
@pytest.mark.timeout(240)
def test_it_says_what_batch_pays(report: RunReport) -> None:
    assert report.failure is None, report.failure
    (headline,) = report.headlines
    assert re.search(r"small-llama, float32, [\d.]+ times its memory: batch 1 gives [\d.,]+ tokens/s", headline)


@sweep
@pytest.mark.timeout(240)
def test_the_page_has_all_figures_loads_nothing_and_says_what_was_not_measured(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(html) < MOST_BYTES
    assert "does not fit: batch 100,000" in page.text
    assert "unknown side 'other-disk'" in page.text
    assert page.text.count("not answered yet") == 2
    (slider,) = [figure["layout"]["sliders"][0] for figure in page.figures if "sliders" in figure["layout"]]
    assert len(slider["steps"]) > 1  # each step has its data, so that it works without a kernel


@sweep
@pytest.mark.timeout(240)
def test_the_study_is_kept_and_the_weights_are_in_the_requested_folder(report: RunReport) -> None:
    folder = report.html.parents[1]
    (file,) = (folder / "runs").glob("*-small-llama-larger-than-memory.json")
    result = load_study(file)
    assert [point.batch for point in result.points] == [1, 2]
    assert result.points[0].streamed_bytes > 0
    assert result.shown.spans
    assert max(sample.bytes for sample in result.memory) <= result.plan.memory
    assert list((folder / "disk").glob("Llama*"))


def test_every_setting_has_a_control_with_help() -> None:
    controls = Controls(SETTINGS, {}, lambda settings, follow: None)
    assert controls.settings == SETTINGS
    assert all(control.tooltip for control in controls._inputs.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batches": " , "}, "expected numbers of sequences"),
        ({"precision": "int5"}, "unknown precision"),
        ({"memory_gb": 0.0}, "got memory_gb = 0.0, expected 0.001 to"),
        ({"memory_gb": "one"}, "got memory_gb = 'one', expected"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StreamingBench(**({"model": "tiny-gpt2"} | settings))
