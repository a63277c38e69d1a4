"""The choice of tokens in a comparison: the most likely token, or sampling with settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.system.bounds import BOUNDS, SettingBounds
from labkit.system.comma_list import listed
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

SHARE = SettingBounds(0, 1, whole=False)
SETTINGS = {  # of transformers' `generate`
    "temperature": BOUNDS["temperature"]._replace(zero=False, less="; leave sample out for greedy search"),
    "top_k": SettingBounds(0, 10_000_000),
    "top_p": SHARE,
    "min_p": SHARE,
    "typical_p": SHARE._replace(above=True),
    "epsilon_cutoff": SHARE,
    "eta_cutoff": SHARE,
    "repetition_penalty": SettingBounds(1e-6, 1000, whole=False),  # it divides logits, as the temperature does
}
EXAMPLE = "such as top_p=0.9,temperature=0.8"


def sample_text(sample: str | Mapping[str, float] | None) -> str:
    """The settings of sampling as records have them, such as "temperature=0.8,top_p=0.9", from text or a mapping. None
    and empty text stand for greedy search. UserError for an unknown setting or a value that it cannot have.
    """
    settings = _settings(sample)
    return ",".join(f"{name}={settings[name]:.15g}" for name in sorted(settings))


def generation_arguments(sample: str) -> dict[str, Any]:
    """Arguments of `generate` for these settings. Other settings have transformers' defaults: top_k is 50."""
    return {"do_sample": bool(sample), **_settings(sample)}


def _settings(sample: str | Mapping[str, float] | None) -> dict[str, float]:
    if not isinstance(sample, str | Mapping | None):
        raise UserError(f"got sample = {sample!r}, expected settings, {EXAMPLE}")
    settings = _read(sample) if isinstance(sample, str) else dict(sample or {})
    return {name: _checked(name, value) for name, value in settings.items()}


def _read(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for item in listed(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name in settings:
            why = "a setting that is there already" if equals else "a word without ="
            raise UserError(f"got sample = {text!r} with {item!r}, {why}; expected settings, {EXAMPLE}")
        try:
            settings[name] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            settings[name] = value
    return settings


def _checked(name: str, value: Any) -> float:
    if name not in SETTINGS:
        hint = did_you_mean(str(name), SETTINGS)
        raise UserError(f"got {name!r} in sample{hint}; expected some of {', '.join(SETTINGS)}, {EXAMPLE}")
    SETTINGS[name].check(name, value)
    return int(value) if SETTINGS[name].whole else float(value)
