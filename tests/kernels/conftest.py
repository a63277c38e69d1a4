"""Every test here runs on one thread of torch, unless it is about threads."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread: None) -> None:
    pass
