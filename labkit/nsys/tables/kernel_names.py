"""Short names of kernels. Full names run to thousands of characters, of which a few tell kernels apart."""

from __future__ import annotations

import re
from functools import lru_cache

SPACES = re.compile(r"\b(?:\w+::)+(?=[\w(])")  # namespaces
CASTS = re.compile(r"\((?:unsigned )?(?:int|long|bool)\)(?=[\w-])")  # nsys writes "(int)4"
# Kernels of PyTorch, CUTLASS and others that are templates for any work. A template argument tells the work.
TEMPLATES = re.compile(
    r"^(?:\w*elementwise_kernel\w*|reduce_kernel|Kernel2?|kernel|\w*DeviceScan\w*|index_\w*kernel\w*)$"
)
DOES = re.compile(r"\b(?!(?:gpu_kernel_impl|TensorIterator|Array|OffsetCalculator|TrivialOffset)\w*)"
                  r"(\w*(?:Functor\w*|_kernel\w*|cutlass\w+|gemm\w+|Ops)|\w+Kernel\w*)\b")  # fmt: skip

WRAPS = re.compile(r"(?:[AB]?Unary|Binary)Functor\w*")  # a functor around the one that does the work
ELLIPSIS = "…"
ENDS = re.compile(r"(?:_kernel)?(?:_(?:cuda|impl))*$")


@lru_cache(maxsize=100_000)
def brief(name: str) -> str:
    """A kernel's name without its result's type, namespaces, casts and parameters.

    For a template of any work, the name and the arguments that tell the work: "reduce_kernel<MeanOps>".
    """
    text = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    text = _without_parameters(CASTS.sub("", SPACES.sub("", text)))
    head, bracket, inner = text.partition("<")
    if bracket and TEMPLATES.match(head):
        work = list(dict.fromkeys(argument for argument in DOES.findall(inner) if argument != head))
        work = [argument for argument in work if not WRAPS.fullmatch(argument)] or work
        if work:
            return f"{head}<{', '.join(ENDS.sub('', argument) for argument in work[:2])}>"
    return text


def _without_parameters(text: str) -> str:
    """The text without the brackets at its end."""
    if not text.endswith(")"):
        return text
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            return text[:at].strip() or text
    return text


def cut(text: str, width: int) -> str:
    """The text in at most `width` characters, without its middle, because names differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}{ELLIPSIS}{text[len(text) - tail :] if tail else ''}"
