"""A report of each notebook, which is run once."""

from collections.abc import Callable
from functools import cache

import pytest
from helpers.notebooks.notebook_cases import CASES
from helpers.notebooks.pages import run_in

from labkit.notebooks import RunReport


@pytest.fixture(scope="session")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunReport]:
    """Runs a notebook, such as "05", with its small settings. The folder of its `out` has its `runs`."""

    @cache
    def run(number: str) -> RunReport:
        case, folder = CASES[number], tmp_path_factory.mktemp("report")
        return run_in(folder, case.path, case.prepare(folder, case.settings))

    return run
