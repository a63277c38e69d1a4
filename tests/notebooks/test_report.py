"""The HTML report is self-contained: it loads no other file."""

import re

import plotly.graph_objects as go
import pytest
from helpers.notebooks.pages import Page
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.figures.theme import finish
from labkit.notebooks import Failure
from labkit.notebooks.report import PLOTLY_MIME_TYPE, contained, html_report
from labkit.system.progress import OUTCOME_MIME_TYPE
from labkit.widgets.live import as_bundle


def notebook(*bundles: dict[str, object]) -> NotebookNode:
    cells = [new_markdown_cell("# A question\n\nSome *text*.")]
    cells += [
        new_code_cell(f"show({index})", outputs=[new_output("display_data", data)])
        for index, data in enumerate(bundles)
    ]
    return new_notebook(cells=cells)


def report(node: NotebookNode, failure: Failure | None = None) -> str:
    return html_report(node, title="stem", parameters={"model": "<gpt2>"}, seconds=61.0, failure=failure)


def figure(title: str = "bars") -> go.Figure:
    return go.Figure(go.Bar(x=[1, 2], y=[3, 4]), layout={"title": {"text": title}})


def test_many_figures_share_one_plotly_js() -> None:
    page = Page(report(notebook(as_bundle(figure()), as_bundle(figure()), as_bundle(figure()))))
    assert [library.startswith("/**\n* plotly.js v") for library in page.libraries] == [True]
    assert len(page.figures) == 3


def test_without_figures_there_is_no_plotly_js() -> None:
    html = report(notebook({"text/plain": "4"}))
    assert len(html) < 50_000
    assert Page(html).scripts == []
    assert Page(html).libraries == []


def test_nothing_is_loaded_from_outside() -> None:
    page = Page(report(notebook(as_bundle(figure()), {"text/html": "<b>bold</b>"})))
    assert page.outside == []


@pytest.mark.parametrize(
    "bundle",
    [
        {"application/javascript": "fetch('https://example.org')"},
        {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "a widget"},
    ],
)
def test_live_outputs_are_left_out(bundle: dict[str, object]) -> None:
    page = Page(report(notebook(bundle)))
    assert page.scripts == []
    assert page.outside == []


def test_a_browser_is_told_to_load_nothing_whatever_an_output_holds() -> None:
    page = Page(report(notebook({"text/html": '<img alt="" src="https://example.org/x.png">'})))
    assert page.outside != []
    assert page.policy.startswith("default-src 'none'")
    assert "http" not in page.policy


def test_a_figures_text_cannot_end_its_script() -> None:
    title = "</script><!-- <script>alert(1)</script>"
    html = report(notebook(as_bundle(figure(title))))
    page = Page(html)
    assert "alert(1)" not in html
    assert page.figures[0]["layout"]["title"]["text"] == title


def test_a_title_of_labkit_becomes_a_caption_in_which_only_bold_is_markup() -> None:
    labkit_figure = finish(figure(), "<b>a</b> < <script>b</script>", "one<br>two & three", 300)
    html = report(notebook(as_bundle(labkit_figure)))
    assert "<b><b>a</b> &lt; &lt;script&gt;b&lt;/script&gt;</b><span>one</span><span>two &amp; three</span>" in html
    (drawn,) = Page(html).figures
    assert "title" not in drawn["layout"]
    assert drawn["layout"]["height"] == 300
    assert drawn["layout"]["margin"]["t"] < labkit_figure.layout.margin.t


SWALLOWING = ("<!--<script>", "<!--", "<script>", "<style>", "<textarea>", "<title>", "<script><!-- <script> </script>")


def test_no_text_swallows_the_rest_of_the_page() -> None:
    cells = []
    for index, text in enumerate(SWALLOWING):
        bundles = [{"text/html": f"<b>{text}</b>"}, {"text/markdown": f"*{text}*"}, as_bundle(figure(text))]
        outputs = [new_output("display_data", bundle) for bundle in bundles]
        cells += [
            new_markdown_cell(f"# A question {text}\n\n{text}"),
            new_code_cell(f"show('{text}')", outputs=outputs),
            new_markdown_cell(f"last words {index}."),
        ]
    text = SWALLOWING[0]
    html = html_report(
        new_notebook(cells=cells), title=text, parameters={"model": text}, seconds=1.0, failure=Failure(1, text, text)
    )
    page = Page(html)
    for index in range(len(SWALLOWING)):
        assert f"last words {index}." in page.text
    assert tuple(drawn["layout"]["title"]["text"] for drawn in page.figures) == SWALLOWING
    assert "Plotly.react" in page.scripts[-1]
    for script in re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL):
        assert "<!--" not in script or "<script" not in script


def test_whole_scripts_and_comments_of_an_output_stay() -> None:
    html = "<!-- a --><style>b { c: d }</style><script>e(1 < 2)</script><textarea>f</textarea>"
    assert contained(html) == html


def test_a_parameter_can_hold_any_text_of_the_template() -> None:
    node = notebook(as_bundle(figure()))
    for text in ("plotly-js-goes-here", "{{ report.slot }}"):
        html = html_report(node, title="stem", parameters={"model": text}, seconds=1.0)
        assert len(Page(html).libraries) == 1
        assert f"<b>{text}</b>" in html


def test_the_figure_is_preferred_to_other_renderings_of_it() -> None:
    bundle = as_bundle(figure()) | {"text/html": "<script>second_copy()</script>"}
    page = Page(report(notebook(bundle)))
    assert PLOTLY_MIME_TYPE in bundle
    assert len(page.figures) == 1
    assert not any("second_copy" in script for script in page.scripts)


def test_the_page_says_what_was_run_and_how_it_ended() -> None:
    html = report(notebook({"text/plain": "4"}))
    assert "<title>A question</title>" in html
    assert "&lt;gpt2&gt;" in html
    assert "passed after 61 s" in html
    failed = report(notebook({"text/plain": "4"}), Failure(2, "show(0)", "the kernel died"))
    assert "cell 2 (show(0)): the kernel died" in failed
    assert "passed" not in failed


OUTCOME = {"claim": "twice <as> fast", "grade": "not trustworthy: 2 rounds", "trusted": False, "machine": "a CPU"}


def test_it_begins_with_the_result_its_grade_and_the_machine() -> None:
    node = notebook({OUTCOME_MIME_TYPE: OUTCOME, "text/plain": "said in its cell"})
    text = Page(report(node)).text
    order = ["A question", "twice <as> fast", "not trustworthy: 2 rounds", "a CPU", "Some text.", "said in its cell"]
    places = [text.index(part, text.index("</style>") if "</style>" in text else 0) for part in order]
    assert places == sorted(places)
    assert text.count("A question") == 2  # the title of the page, and its heading


def test_parameters_are_told_in_words_and_empty_ones_not_at_all() -> None:
    node = notebook({"text/plain": "4"})
    html = html_report(node, title="stem", parameters={"new_tokens": 4, "read_mb": None, "question": ""}, seconds=1.0)
    assert "<span>new tokens <b>4</b></span>" in html
    assert "read mb" not in html
    assert "None" not in html
