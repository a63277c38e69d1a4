"""The bench of timelines on a machine without a browser."""

import pytest

from labkit.bench import timeline


def test_without_a_browser_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeline, "missing", lambda: "got no Chromium")
    monkeypatch.setattr(timeline, "measure", lambda events: pytest.fail("it measured"))
    timeline.main(1000)
    printed = capsys.readouterr()
    assert (printed.out, "got no Chromium" in printed.err) == ("", True)
