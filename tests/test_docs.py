"""The site of `make docs` builds without a warning, and opens from the disk without requests to the outside."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from helpers.notebooks.browser_lab import needs_browser
from helpers.notebooks.pages import LOADING

from labkit.widgets.browser import opened_page

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(
    rf"""\b(?:{"|".join(LOADING)})=["']?(?:https?:)?//|href="mailto:|url\(["']?(?:https?:)?//|@import"""
)
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Site built like `make docs`, with warnings as errors, but without the notebooks, which take minutes to run."""
    folder = tmp_path_factory.mktemp("docs")
    options = ["-q", "-W", "--keep-going", "-c", "docs", "-d", str(folder / "doctrees")]
    command = [sys.executable, "-P", "-m", "sphinx", *options, ".", str(folder / "site")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return folder / "site"


def test_nothing_is_outside(site: Path) -> None:
    files = [file for kind in ("html", "css") for file in site.rglob(f"*.{kind}")]
    assert len(files) > 20
    assert {str(file) for file in files if OUTSIDE.search(file.read_text())} == set()


def test_the_reference_has_the_words_of_docstrings_and_plain_types(site: Path) -> None:
    pages = {page.stem: page.read_text() for page in (site / "docs" / "reference").glob("*.html")}
    assert "Share of the physical limit: median over runs" in pages["harness"]
    for name, page in pages.items():
        assert "StudySetting(" not in page, name
        assert ">Type<" not in page, name
        assert "Alias for field number" not in page, name


def test_pages_of_notebooks_lead_back_once(tmp_path: Path) -> None:
    page = tmp_path / "notebooks" / "01_question.html"
    page.parent.mkdir()
    page.write_text("<main>figures</main>")
    lead_back = runpy.run_path(str(ROOT / "docs" / "conf.py"))["lead_back"]
    for _ in range(2):
        lead_back(SimpleNamespace(outdir=tmp_path), None)
    assert page.read_text().count('<a href="../docs/notebooks.html">') == 1


def test_no_caption_of_the_sidebar_repeats_the_title_of_a_page(site: Path) -> None:
    (tree,) = re.findall(r'<div class="sidebar-tree">.*?</aside>', (site / "README.html").read_text(), re.DOTALL)
    captions = set(re.findall(r'<span class="caption-text">([^<]+)</span>', tree))
    titles = set(re.findall(r"<a [^>]*>([^<]+)</a>", tree))
    assert captions
    assert {"Notebooks", "Reference"} <= titles
    assert not captions & titles


def test_every_link_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    """Leaves out the pages of the notebooks, which only `make docs` runs."""
    texts = {file: file.read_text() for file in site.rglob("*.html") if file.parent != site / "notebooks"}
    anchors = {file: set(re.findall(r'id="([^"]+)"', text)) for file, text in texts.items()}
    wrong = []
    for file, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = unquote(link).partition("#")
            target = (file.parent / path.partition("?")[0]).resolve() if path else file
            if not link.startswith("data:") and target.parent != site / "notebooks":
                fits = target.exists() and (not anchor or anchor in anchors.get(target, {anchor}))
                wrong += [] if fits else [f"{file.relative_to(site)}: {link}"]
    assert wrong == []


@needs_browser
def test_it_opens_from_the_disk_and_its_search_finds(site: Path) -> None:
    with opened_page(width=400) as (page, errors):
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.wait_for_url("**/README.html")
        for name in (
            "README",
            "docs/measuring",
            "docs/notebooks",
            "docs/reference/command-line",
            "docs/reference/nsys",
        ):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate(SIDEWAYS) <= 0, name
        page.goto((site / "search.html").as_uri() + "?q=projection_summary")
        page.wait_for_selector("ul.search li a[href*='nsys.html']")
        assert [url for url in urls if not url.startswith(("file:", "data:"))] == []
        assert errors == []
