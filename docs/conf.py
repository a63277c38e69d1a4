"""How `make docs` makes the site: the pages of the checkout as they are, with README.md as the first one."""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

import labkit

sys.path.insert(0, str(Path(__file__).parent))  # Sphinx runs this file with another folder as the first

from commands import Commands
from public_names import (
    PublicNames,
    fields_with_their_comments,
    named_by_number,
    plain_types,
    text_from_the_first_line,
)
from trace_tables import TraceTables

ROOT = Path(__file__).parents[1]

project = "labkit"
release = version = labkit.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "README"
include_patterns = ["README.md", "docs/**.md", "profiles/*.md"]
exclude_patterns = [".*", "build", "runs", "tests", "*.egg-info", "**.ipynb", "**.failed.html"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries, whose pages are outside
suppress_warnings = ["myst.header"]  # the pages of results begin their tables at a level of their own

myst_heading_anchors = 4

default_role = "code"
smartquotes = False  # they would make one dash of the two before an option
autodoc_default_options = {"members": True, "exclude-members": "model_config"}  # pydantic's
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"labkit {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = [str(path) for path in [ROOT / "build" / "pages"] if path.exists()]  # the executed notebooks
html_additional_pages = {"index": "index.html"}
templates_path = ["_templates"]
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # a page on the disk may not read others for it

BACK = '<nav><a href="../docs/notebooks.html">labkit: all notebooks</a></nav>'

# The sidebar, which only the site has: what each of these pages leads to, under which caption.
NAVIGATION = {
    "README": {
        "First": ["docs/install", "docs/notebooks", "docs/workshop", "docs/which-command"],
        "How to": [
            "docs/profile-my-script",
            "docs/compare-my-model",
            "docs/traces",
            "docs/timelines",
            "docs/several-machines",
            "docs/gpu",
            "docs/larger-than-memory",
            "docs/deepspeed",
            "docs/checkpoints",
            "docs/models",
            "docs/all-models",
        ],
        "Numbers": ["docs/measuring", "docs/why-placement-matters", "docs/when-numbers-look-wrong", "profiles/README"],
        "Look up": [
            "docs/reference/README",
            "docs/glossary",
            "docs/architecture",
            "docs/changelog",
            "docs/CONTRIBUTING",
        ],
    },
    "docs/workshop": {"": ["workshop-figures"]},
    "profiles/README": {"": ["cpu-*", "gpu-*"]},
    "docs/reference/README": {"": ["command-line", "labkit", "[!l]*"]},
}


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    for caption, pages in NAVIGATION.get(name, {}).items():
        above = [f":caption: {caption}"] if caption else []  # a page says its own title
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", *above, "", *pages, "```\n"])


def lead_to_executed_notebooks(app: Sphinx, page: nodes.document) -> None:
    """Links to a notebook of the checkout lead to the page of its run."""
    up = "../" * app.env.docname.count("/")
    for link in list(page.findall(download_reference)):
        target = Path(link["reftarget"])
        if target.suffix == ".ipynb":
            link.replace_self(nodes.reference("", "", *link.children, refuri=f"{up}notebooks/{target.stem}.html"))


def lead_back(app: Sphinx, failed: Exception | None) -> None:
    """The pages of executed notebooks, which stand alone, get a way back to the site that they are on."""
    for file in (Path(app.outdir) / "notebooks").glob("*.html"):
        page = file.read_text(encoding="utf-8")
        if BACK not in page:
            file.write_text(page.replace("<main>", f"<main>{BACK}", 1), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("commands", Commands)
    app.add_directive("public-names", PublicNames)
    app.add_directive("trace-tables", TraceTables)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", lead_to_executed_notebooks, priority=400)  # before Sphinx copies what is linked
    app.connect("autodoc-process-signature", plain_types)
    app.connect("autodoc-skip-member", named_by_number)
    app.connect("autodoc-process-docstring", text_from_the_first_line, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", fields_with_their_comments)
    app.connect("build-finished", lead_back)
    return {"parallel_read_safe": True}
