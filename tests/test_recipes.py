"""Recipes of docs/CONTRIBUTING.md say enough, and all that they say is needed: tools/try_recipes.py follows them."""

import subprocess
import sys

import pytest
from helpers.house.source_tree import ROOT


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_recipes_are_true() -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "try_recipes.py"), "record", "peer"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("with all steps nothing fails") == 2


@pytest.mark.sweep
def test_a_kind_without_a_toy_is_refused() -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "try_recipes.py"), "cake"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "got cake, expected some of " in process.stderr
