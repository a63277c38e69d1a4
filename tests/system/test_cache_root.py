"""The folder of files that labkit can make again."""

from pathlib import Path

import pytest

from labkit.system.cache_root import cache_root

HOME = Path("/home/ada")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LABKIT_CACHE": "/scratch", "XDG_CACHE_HOME": "/xdg"}, Path("/scratch")),
        ({"LABKIT_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, Path("/xdg/labkit")),
        ({"XDG_CACHE_HOME": ""}, HOME / ".cache/labkit"),
        ({}, HOME / ".cache/labkit"),
    ],
)
def test_the_nearest_wish_counts(variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: HOME)
    for name in ("LABKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == expected


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fails)
    for name in ("LABKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() is None
