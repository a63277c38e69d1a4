"""The names of ranges without the numbers that only count: "train_step 7" and "train_step 8" are both "train_step".

Numbers of layers, experts, ranks and the like tell which part of a model or a machine it is, so they stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from labkit.nsys.arrays import Ints
from labkit.stages import DOMAIN

EMITTED = re.compile(r", (?:seq|op_id) = .*$", re.DOTALL)  # added to names by torch.autograd.profiler.emit_nvtx
NUMBER = r"(?:\s*[#_/=:-]?\s*\d+|\s*\[\s*\d+\s*\]|\s*\(\s*\d+\s*\))"
STEP = re.compile(
    rf"(?P<word>step|(?<![a-z])iter|iteration|epoch){NUMBER}(?:\s*(?:/|of)\s*\d+)?(?![a-z0-9]|\.\d)", re.IGNORECASE
)
ENDS_IN_NUMBER = re.compile(r"(?P<bare>.*[^\W\d_])(?:\s*[\s#_/=:-]\s*\d+|\s*\[\s*\d+\s*\]|\s*\(\s*\d+\s*\))", re.DOTALL)
PARTS = re.compile(  # words before the number of a part
    r"(?:layers?|blocks?|stages?|phases?|experts?|heads?|ranks?|devices?|gpus?|cuda|streams?|workers?|nodes?|shards?|hosts?|"
    r"process|pid|tid|threads?|lines?|groups?|branch|encoder|decoder|conv|fc|linear|mlp|attn|attention|norm|module)$",
    re.IGNORECASE,
)
MANY = 8  # names that differ in their last number only


def without_numbers(names: pd.Categorical, process: Ints) -> pd.Categorical:
    """The bare name of each range. `process`: a number of the process or thread of each.

    A name loses the numbers that emit_nvtx adds, and the number of a step, an iteration or an epoch. It also loses
    another last number if at least MANY names differ in it, each of them occurs once in a process, and no word of PARTS
    is before the number. labkit's own names keep their numbers.
    """
    texts = [_without_steps(str(name)) for name in names.categories]
    counts = _most_in_a_process(names.codes, process, len(texts))
    counted = _counted(text for text, count in zip(texts, counts.tolist(), strict=True) if count == 1)
    repeated = {_split(text) for text, count in zip(texts, counts.tolist(), strict=True) if count > 1}
    for at, text in enumerate(texts):
        bare = _split(text)
        if bare in counted and bare not in repeated:
            texts[at] = str(bare)
    codes, categories = pd.factorize(np.array(texts, object))
    return pd.Categorical.from_codes(np.append(codes, -1)[names.codes], pd.Index(categories, dtype="str"))


def _without_steps(name: str) -> str:
    return name if name.startswith(f"{DOMAIN}:") else STEP.sub(r"\g<word>", EMITTED.sub("", name))


def _split(text: str) -> str | None:
    """The text before a last number that may count; None without one."""
    match = None if text.startswith(f"{DOMAIN}:") else ENDS_IN_NUMBER.fullmatch(text)
    return None if match is None or PARTS.search(match["bare"]) else match["bare"]


def _counted(texts: Iterable[str]) -> set[str | None]:
    """What at least MANY texts are without their last number."""
    bare, counts = np.unique([text for text in map(_split, set(texts)) if text is not None], return_counts=True)
    return set(bare[counts >= MANY].tolist())


def _most_in_a_process(codes: Ints, process: Ints, names: int) -> Ints:
    """For each name the greatest number of its ranges in one process."""
    pairs, counts = np.unique(np.asarray(process, np.int64) * names + codes, return_counts=True)
    most = np.zeros(names, np.int64)
    np.maximum.at(most, pairs % max(names, 1), counts)
    return most
