"""Pages of figures in a real browser: all texts are readable at any width, in dark mode and on paper."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from helpers.notebooks.browser_lab import needs_browser
from helpers.studies.all_figures import drawings
from helpers.studies.comparisons import comparison

from labkit import figures
from labkit.figures.dark import IN_THE_DARK
from labkit.figures.page import PAGE, POLICY, Figures, figure_page, stylesheet
from labkit.figures.theme import INK
from labkit.widgets.browser import opened_page

# Finds texts that are clipped or overlap other texts or the buttons, and a page that scrolls sideways.
FAULTS = """() => {
  const faults = [], root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) faults.push("the page scrolls sideways");
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const frame = plot.querySelector(".main-svg").getBoundingClientRect();
    const buttons = [...plot.querySelectorAll(".modebar-group")].filter((group) => group.getBoundingClientRect().width);
    const taken = buttons.map((group) => [group.getBoundingClientRect(), "the buttons"]);
    for (const text of plot.querySelectorAll(".main-svg text")) {
      const box = text.getBoundingClientRect(), words = text.textContent;
      if (!box.width) continue;
      const out = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
      if (Math.max(...out) > 1) faults.push(`clipped: ${words}`);
      for (const [other, name] of taken) {
        const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (wide > 3 && high > 4) faults.push(`${words} is on ${name}`);
      }
      taken.push([box, words]);
    }
  }
  return faults;
}"""
WIDTHS = "() => [...document.querySelectorAll('.drawing')].map((drawing) => drawing.layout.width)"
DRAWN = "() => document.documentElement.dataset.drawn"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Page of all figures. It must log no errors."""
    embedded, drawn = Figures(), drawings()
    places = "".join(embedded.place(json.loads(drawing.to_json())) for drawing in drawn.values())
    file: Path = tmp_path_factory.mktemp("page") / "page.html"
    parts = {"policy": POLICY, "title": "figures", "style": stylesheet(), "figure": places, "drawn": embedded.drawn()}
    file.write_text(PAGE.format(**parts), encoding="utf-8")
    with opened_page() as (browser_page, errors):
        browser_page.goto(file.as_uri())
        browser_page.wait_for_function(DRAWN)
        assert browser_page.locator(".js-plotly-plot").count() == len(drawn)
        yield browser_page
        assert errors == []


def test_the_page_has_every_figure() -> None:
    """A text in place of a figure would not be drawn."""
    drawn = drawings()
    assert drawn.keys() == {name for name in figures.__all__ if name.endswith("_figure") or name == "timeline"}
    assert [name for name, figure in drawn.items() if not isinstance(figure, go.Figure)] == []


@needs_browser
@pytest.mark.parametrize("width", [400, 600, 700, 1000, 1400])
def test_nothing_is_clipped_and_no_words_lie_on_others(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function(f"({WIDTHS})()[0] === Math.max(480, document.querySelector('.plot').clientWidth)")
    assert page.evaluate(FAULTS) == []


@needs_browser
def test_buttons_are_shown_where_they_lie_on_no_words(page: Any) -> None:
    hidden = {}
    for width in (600, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"({WIDTHS})()[0] === Math.max(480, document.querySelector('.plot').clientWidth)")
        hidden[width] = page.locator(".plot.covered").count()
    assert 0 < hidden[600] < page.locator(".plot").count()
    assert hidden[1400] == 0


@needs_browser
def test_in_the_dark_what_is_drawn_in_ink_is_light(page: Any) -> None:
    ink = "getComputedStyle(document.querySelector('.ytick text')).fill"
    for scheme, color in (("dark", IN_THE_DARK[INK]), ("light", INK)):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(ink) == "rgb({}, {}, {})".format(*bytes.fromhex(color[1:]))


@needs_browser
def test_on_paper_figures_are_as_wide_as_a_sheet_and_then_as_before(page: Any) -> None:
    widths = page.evaluate(WIDTHS)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert set(page.evaluate(WIDTHS)) == {680}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(WIDTHS) == widths


@needs_browser
def test_a_browser_that_cannot_unpack_figures_says_so(page: Any) -> None:
    page.add_init_script("delete globalThis.DecompressionStream")
    page.reload()
    messages = page.locator(".missing").all_inner_texts()
    assert len(messages) == len(page.locator("figcaption").all_inner_texts())
    assert "Firefox from 113" in messages[0]


@needs_browser
def test_a_page_counts_as_loaded_once_its_figures_are_drawn_so_that_printing_it_at_once_prints_them(
    page: Any, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(figure_page(figures.per_token_figure(comparison())), encoding="utf-8")
    browser_page = page.context.browser.new_page()
    browser_page.add_init_script(
        "addEventListener('load', () => (window.drawnAtLoad = document.documentElement.dataset.drawn))"
    )
    browser_page.goto(file.as_uri())
    assert browser_page.evaluate("window.drawnAtLoad") == "yes"
    assert browser_page.locator("iframe").count() == 0
    browser_page.close()
