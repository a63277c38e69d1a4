"""Notebook cells with a workbench whose measurement is faked."""

from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "model": "tiny-gpt2", "dtype": "float32", "batch": 1, "prompt_tokens": 16, "new_tokens": 8, "baseline": "hf-eager",
    "threads": 0, "rounds": 3,
}  # fmt: skip
FAKE = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from helpers.studies.comparisons import comparison
from labkit import figures, widgets
def compare(*, progress, **settings):
    progress(1, 2, "round 1 of 2"); asked.append(settings)
    return comparison(dtype=settings["dtype"])
asked = []; widgets.Workbench.study = staticmethod(compare)
bench = widgets.Workbench(**{SETTINGS})
"""
