"""The names of ranges without the numbers that only count: "train_step 7" and "train_step 8" are both "train_step".

Numbers of layers, experts, ranks and the like tell which part of a model or a machine it is, so they stay.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    bare = [_split(text) for text in texts]
    count_of = Counter(map(_split, set(texts)))
    many = np.array([stem is not None and count_of[stem] >= MANY for stem in bare], bool)
    if many.any():
        repeated = {bare[at] for at in _repeated(names.codes, process, many)}
        for at in np.flatnonzero(many).tolist():
            if bare[at] not in repeated:
                texts[at] = str(bare[at])
    codes, categories = pd.factorize(np.array(texts, object))
    return pd.Categorical.from_codes(np.append(codes, -1)[names.codes], pd.Index(categories, dtype="str"))


def _without_steps(name: str) -> str:
    return name if name.startswith(f"{DOMAIN}:") else STEP.sub(r"\g<word>", EMITTED.sub("", name))


def _split(text: str) -> str | None:
    """The text before a last number that may count; None without one."""
    match = None if text.startswith(f"{DOMAIN}:") else ENDS_IN_NUMBER.fullmatch(text)
    return None if match is None or PARTS.search(match["bare"]) else match["bare"]


def _repeated(codes: Ints, process: Ints, among: NDArray[np.bool_]) -> list[int]:
    """The categories of `among` that several rows of one process have."""
    rows = np.append(among, False)[codes]
    pairs, counts = np.unique(process[rows].astype(np.int64) * len(among) + codes[rows], return_counts=True)
    return (pairs[counts > 1] % len(among)).tolist()
