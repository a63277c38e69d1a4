"""Any text put into Markdown is rendered as that text, and stays in its cell."""

from html.parser import HTMLParser

import pytest
from helpers.sweeps import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from nbconvert.filters.markdown_mistune import markdown2html_mistune

from labkit.system.markdown import as_text, markdown_table
from labkit.system.result_table import Claim, ResultTable

HOSTILE = [
    "a",
    "|",
    "b",
    "\\|",
    "<b>c</b>",
    "[d](javascript:e)",
    "`f`",
    "$g$",
    "*h*",
    "_i_",
    "i_j",
    "~~k~~",
    "&lt;",
    "&amp;",
    "<script>l</script>",
    "\\",
]
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text("ab|\\`*_~$<>[]()&;#!-+=: \n1.", max_size=6), max_size=5).map(
    " ".join
)


class RenderedPage(HTMLParser):
    """Elements of a rendered page, and the texts of its cells, paragraphs, list items and headings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)
        if tag in ("th", "td", "p", "li", "h2"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=sweep)])
def test_a_cell_shows_its_text_and_nothing_else(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(title=TEXTS, cell=TEXTS)
    def check(title: str, cell: str) -> None:
        page = RenderedPage(markdown2html_mistune(markdown_table(("n", as_text(title)), [("x", as_text(cell))])))
        assert page.elements == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
        assert [" ".join(text.split()) for text in page.texts] == [
            "n",
            *(" ".join(value.split()) for value in (title, "x", cell)),
        ]

    check()


def test_no_text_of_a_result_is_markup() -> None:
    hostile = "<img src=x> | **b** [l](u)"
    table = ResultTable(hostile, (hostile, hostile), ((hostile, hostile),), Claim(hostile, "bold", hostile), (hostile,))
    page = RenderedPage(markdown2html_mistune(table.markdown()))
    assert "img" not in page.elements
    assert page.elements.count("strong") == 1  # the claim
    assert page.elements.count("a") == 1  # the heading's own anchor
    heading, *rest = (text.strip() for text in page.texts)
    assert heading.startswith(hostile)
    assert rest == [*[hostile] * 4, f"{hostile} {hostile}", hostile]


def test_what_an_interval_or_a_name_looks_like_is_left_alone() -> None:
    plain = "1.35x [1.2, 1.5] of q_proj (x86_64), +3 %, 4 > 3"
    assert as_text(plain) == plain
