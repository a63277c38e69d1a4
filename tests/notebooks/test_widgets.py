"""The workbench: the same calls work live and in batch."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.notebooks.notebook_runs import FAKE, SETTINGS
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep
from ipywidgets import Label
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from labkit import figures
from labkit.notebooks.report import PLOTLY_MIME_TYPE
from labkit.studies.comparison import study_comparison
from labkit.studies.settings import settings_of
from labkit.system.progress import Progress
from labkit.widgets import Workbench, live
from labkit.widgets.bench import NOT_YET, UNDER_WAY
from labkit.widgets.controls import OUTSIDE, STOPPED, Controls, Stopped
from labkit.widgets.live import Execution, Slot, is_live

DECLARED = settings_of(study_comparison)


class Client(NotebookClient):
    """Client of a live kernel: outputs can be replaced, and input prompts are allowed."""

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        client.allow_stdin = True
        return client


def execute(client: type[NotebookClient], *sources: str) -> list[Any]:
    notebook = new_notebook(cells=[new_code_cell(source) for source in (FAKE, *sources)])
    client(notebook, kernel_name="python3", timeout=120).execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def printed(outputs: list[Any]) -> list[str]:
    """Lines that a cell printed."""
    return "".join(output["text"] for output in outputs if output.output_type == "stream").splitlines()


def subtitle(output: Any) -> str:
    text: str = output["data"][PLOTLY_MIME_TYPE]["layout"]["title"]["subtitle"]["text"]
    return text


@sweep
def test_in_batch_everything_is_static_and_done_in_its_cell() -> None:
    """Runs the calls of the first notebook, cell by cell."""
    settings, run, view = execute(NotebookClient, "bench", "bench.run()", "bench.view(figures.per_token_figure)")
    assert "<td>tiny-gpt2</td>" in settings[0]["data"]["text/html"]
    assert "hf-eager" in run[0]["data"]["text/plain"]
    assert "float32" in subtitle(view[0])
    assert not any("widget" in kind for output in (*settings, *run, *view) for kind in output["data"])


@sweep
def test_live_nothing_runs_before_run_is_pressed_and_every_view_and_check_follows_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs are widgets, which live as long as the kernel. A second workbench offers the result of the first."""
    monkeypatch.chdir(tmp_path)
    settings, run, view, _, _, pressed, offered = execute(
        Client,
        "bench",
        "bench.run()",
        "bench.view(figures.per_token_figure)",
        "bench.check(lambda record, answer: f'{record.case.dtype}: {answer}', 42)",
        "bench.of_model(lambda model, ranks: f'{model} on {ranks}', 2)",
        "shown = lambda: [view.slot._widget.outputs[0]['data'] for view in bench._views]\n"
        "print(len(asked), *[data['text/markdown'] for data in shown()[1:]])\n"
        "controls = bench._controls\ncontrols._inputs['dtype'].value = 'bfloat16'\n"
        "controls._inputs['model'].value = 'tiny-llama'\ncontrols._run.click()\ncontrols._thread.join()\n"
        "outcome, figure, check, of_model = shown()\n"
        "print(outcome['application/vnd.labkit.outcome+json']['machine'])\n"
        f"print('bfloat16' in figure[{PLOTLY_MIME_TYPE!r}]['layout']['title']['subtitle']['text'])\n"
        "print(check['text/markdown'], of_model['text/markdown'])",
        f"bench = widgets.Workbench(**{SETTINGS})\nbench.run()\nbench.view(lambda record: record.case.dtype)\n"
        "print(bench._controls._label.value)\nbench._controls._last.click()\n"
        "print(shown()[1]['text/markdown'], bench._controls.settings['model'], bench._controls._label.value)",
    )
    for output in (*settings, *run, *view):
        assert "application/vnd.jupyter.widget-view+json" in output["data"]
        assert PLOTLY_MIME_TYPE not in output["data"]
    assert printed(pressed) == [
        f"0 {NOT_YET} {NOT_YET} tiny-gpt2 on 2",
        "Test CPU @ 2 GHz, 2 of 2 cores, 16 GB",
        "True",
        "bfloat16: 42 tiny-llama on 2",
    ]
    before, after = printed(offered)
    assert "Show last shows the result of" in before
    assert after.startswith("bfloat16 tiny-llama the result of")
    assert "Run measures again" in after


PARTS = """
from labkit.harness.compare.interleave import Turns, _timed
def compare(*, progress, show, **settings):
    whole = comparison()
    show(_timed(Turns((whole.baseline, whole.candidate), ([[[1]]], [[[1]]]))).comparison(0, 1))
    print([view.slot._widget.outputs[0]['data'].get('text/markdown', 'figure') for view in bench._views])
    if settings['rounds'] == 3:
        raise ValueError("the second half failed")
    return whole
widgets.Workbench.study = staticmethod(compare)
"""


@sweep
def test_a_view_fills_when_its_part_is_measured_and_a_run_that_fails_shows_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, ran = execute(
        Client,
        "bench.run()\nbench.view(figures.per_token_figure)\nbench.view(figures.stage_figure)",
        PARTS + "controls = bench._controls\n"
        "print([view.slot._content for view in bench._views][1:])\n"
        "bench._measure(controls.settings | {'rounds': 4}, print)\n"
        "figure = bench._views[1].slot._widget.outputs\n"
        "controls._inputs['dtype'].value = 'float16'\ncontrols.start()\ncontrols._thread.join()\n"
        "print(bench.settings['dtype'], bench.settings['rounds'], figure == bench._views[1].slot._widget.outputs)\n"
        "print(controls._label.value)",
    )
    lines = printed(ran)
    assert lines[0] == str([NOT_YET, NOT_YET])
    assert lines[1].endswith(f"'figure', '{UNDER_WAY}']")
    assert lines[-2] == "float32 4 True"
    assert "the second half failed" in lines[-1]


def test_outputs_of_a_cell_that_was_run_again_are_gone() -> None:
    first, second, of_other_cell = Execution("a", "1"), Execution("a", "2"), Execution("b", "3")
    assert first.replaced_by(second)
    assert not first.replaced_by(first)
    assert not first.replaced_by(of_other_cell)
    assert not Execution("", "1").replaced_by(Execution("", "2"))  # a page that does not say which cell it is


def test_a_view_before_the_run_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="run the cell that calls run"):
        Workbench(**SETTINGS).view(figures.per_token_figure)


def test_outside_a_kernel_nothing_is_live() -> None:
    assert not is_live()


@pytest.fixture
def controls() -> Controls:
    return Controls(DECLARED, SETTINGS, lambda settings, follow: comparison())


def test_controls_hold_the_settings_and_keep_their_types(controls: Controls) -> None:
    assert controls.settings == SETTINGS


def test_every_setting_has_help(controls: Controls) -> None:
    assert all(control.tooltip for control in controls._inputs.values())


def test_controls_are_locked_while_it_runs(controls: Controls) -> None:
    with controls.busy() as follow:
        follow(1, 4, "round 1")
        assert all(control.disabled for control in controls._inputs.values())
        assert not controls._end.disabled
        assert (controls._bar.value, controls._bar.max) == (1, 4)
    assert not any(control.disabled for control in controls._inputs.values())
    assert controls._bar.bar_style == "success"


def test_stop_ends_the_run_at_the_next_step(controls: Controls) -> None:
    with controls.busy() as follow:
        follow(1, 4, "round 1")
        controls._end.click()
        with pytest.raises(Stopped):
            follow(2, 4, "round 2")
        follow(4, 4, "done, with the rounds until then")
    with controls.busy() as follow:
        follow(1, 4, "the next run")


def test_a_run_that_keeps_its_part_after_stop_shows_it() -> None:
    started, kept = threading.Event(), []

    def measure(settings: dict[str, Any], follow: Progress) -> None:
        try:
            started.set()
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            follow(1, 1, "the part that was measured")
            kept.append("a part")

    controls = Controls(DECLARED, SETTINGS, measure)
    controls.start()
    assert started.wait(60)
    controls.stop()
    assert controls._thread is not None
    controls._thread.join(60)
    assert (kept, controls._bar.bar_style) == (["a part"], "success")


def test_stop_is_said_at_once_and_ends_a_run_that_tells_no_progress() -> None:
    started = threading.Event()

    def measure(settings: dict[str, Any], follow: Progress) -> None:
        follow(0, 1, "round 1")
        started.set()
        while True:
            time.sleep(0.01)

    controls = Controls(DECLARED, SETTINGS, measure)
    controls._run.click()
    assert started.wait(60)
    controls._end.click()
    assert controls._label.value in ("stopping…", STOPPED)
    assert controls._end.disabled
    assert controls._thread is not None
    controls._thread.join(60)
    assert controls._label.value == STOPPED
    assert not controls._run.disabled


def test_words_have_a_line_of_their_own_and_buttons_a_size_that_they_keep(controls: Controls) -> None:
    controls.say("a long message " * 50)
    buttons, label = controls._buttons.children
    assert label.value.startswith("a long message")
    for button in buttons.children[:2]:
        assert (button.layout.width, button.layout.flex) == ("96px", "0 0 auto")


def test_one_run_at_a_time(controls: Controls) -> None:
    with controls.busy(), pytest.raises(RuntimeError, match="under way"), controls.busy():
        pass


def test_a_second_run_says_that_one_is_under_way_and_stop_still_ends_the_first() -> None:
    started = threading.Event()

    def measure(settings: dict[str, Any], follow: Progress) -> None:
        started.set()
        while True:
            time.sleep(0.01)

    controls, others = (Controls(DECLARED, SETTINGS, measure) for _ in range(2))
    controls.start()
    assert started.wait(60)
    first = controls._thread
    assert first is not None
    for second in (others, controls):
        second.start()
        assert second._thread is not None
        second._thread.join(60)
        assert OUTSIDE in second._label.value
    controls.stop()
    first.join(60)
    assert (first.is_alive(), controls._label.value) == (False, STOPPED)


def test_a_widget_that_is_replaced_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "display", lambda *_, **__: SimpleNamespace(update=lambda *_, **__: None))
    first, second = Label("first"), Label("second")
    slot = Slot(first)
    slot.replace(first)
    assert first.comm is not None
    slot.replace(second)
    assert (first.comm, second.comm is None) == (None, False)
    slot.replace("text")
    assert second.comm is None


def test_a_failed_run_turns_the_bar_red_and_frees_the_controls(controls: Controls) -> None:
    with pytest.raises(ValueError, match="no"), controls.busy():
        raise ValueError("no")
    assert controls._bar.bar_style == "danger"
    assert not controls._run.disabled


def test_the_clock_tells_the_time_of_a_run_and_estimates_the_rest(
    controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = controls._clock, iter([1000.0, 1010.0, 1040.0])
    monkeypatch.setattr("labkit.widgets.page.time", lambda: next(now))
    with controls.busy() as follow:
        assert (clock.begun, clock.left, clock.took) == (1000, -1, -1)
        follow(1, 100, "too early to tell")
        assert clock.left == -1
        follow(25, 100, "a quarter")
        assert (clock.estimated, clock.left) == (1010, 30)
    assert clock.took == 40


def test_an_error_is_shown_next_to_the_bar() -> None:
    def measure(settings: dict[str, Any], follow: object) -> None:
        raise ValueError("unknown model <x>")

    controls = Controls(DECLARED, SETTINGS, measure)
    controls._run.click()
    assert controls._thread is not None
    controls._thread.join(60)
    assert "unknown model &lt;x&gt;" in controls._label.value


def test_a_setting_that_no_list_holds_is_kept_for_the_error_message() -> None:
    assert Controls(DECLARED, SETTINGS | {"dtype": "int3"}, lambda *_: None).settings["dtype"] == "int3"
