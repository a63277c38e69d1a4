"""Runs every test of this folder on one thread of torch, except for tests of threads."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread: None) -> None:
    pass
