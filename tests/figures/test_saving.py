"""Figures become complete files of the kind that the file name asks for, or no file at all."""

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.notebooks.pages import Page
from helpers.studies.comparisons import comparison
from helpers.sweeps import swept

from labkit.figures import per_token_figure, save, saving, summary_table
from labkit.system.errors import RunError, UserError
from labkit.widgets.browser import chromium

needs_chromium = pytest.mark.skipif(chromium() is None, reason="no picture is drawn: got no Chromium")
BEGINNINGS = {".svg": b"<svg", ".png": b"\x89PNG\r\n", ".pdf": b"%PDF-"}


@needs_chromium
@pytest.mark.parametrize("ending", swept(BEGINNINGS, few=(".svg",)))
def test_a_picture_is_of_the_kind_that_its_name_asks_for(ending: bytes, tmp_path: Path) -> None:
    suffix = next(name for name, beginning in BEGINNINGS.items() if beginning == ending)
    path = save(per_token_figure(comparison()), tmp_path / "new" / f"speedup{suffix.upper()}")
    picture = path.read_bytes()
    assert picture.startswith(ending)
    assert suffix != ".svg" or (b"fused against hf-eager" in picture and b'width="1200"' in picture)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_page_needs_no_browser_and_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    page = Page(save(per_token_figure(comparison()), tmp_path / "speedup.html").read_text())
    assert page.outside == []
    assert "plotly.js v" in page.libraries[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "a.gif"}, r"got .*a\.gif, expected a name that ends in \.png, \.svg, \.pdf or \.html"),
        ({"path": "a"}, "expected a name that ends in"),
        ({"path": "a.svg", "width": 0}, "got width = 0, expected a number above 0"),
        ({"path": "a.html", "figure": summary_table(comparison())}, "got a DataFrame .* expected a figure of plotly's"),
    ],
)
def test_what_cannot_be_saved_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    figure = options.pop("figure", per_token_figure(comparison()))
    with pytest.raises(UserError, match=message):
        save(figure, tmp_path / options.pop("path"), **options)
    assert list(tmp_path.iterdir()) == []


def test_what_a_picture_lacks_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaleido")
    target, figure = tmp_path / "a.svg", per_token_figure(comparison())
    target.write_text("before")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none at BROWSER_PATH=.*sudo apt install chromium.* or save it as \.html"):
        save(figure, target)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(broken))
    with pytest.raises(RunError, match=r"a\.svg was not written: the browser that draws it failed"):
        save(figure, target)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UserError, match=r"kaleido.* is not installed; pip install 'labkit\[pictures\]'"):
        save(figure, target)
    assert target.read_text() == "before"
    assert {file.name for file in tmp_path.iterdir()} == {"a.svg", "broken"}


@pytest.mark.sweep
def test_a_browser_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaleido")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(silent))
    monkeypatch.setattr(saving, "SECONDS", 0.5)
    with pytest.raises(RunError, match=r"was not done after 0\.5 s"):
        save(per_token_figure(comparison()), tmp_path / "a.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["silent"]
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(silent) in (process.info["cmdline"] or ())
    ]
