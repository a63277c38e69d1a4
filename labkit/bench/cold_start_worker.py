"""One cold start of `labkit.bench.cold_start`, as a script of a user makes it: import, load, generate.

python -P -m labkit.bench.cold_start_worker SIDE PATH PROMPT NEW THREADS [PACKAGES]

Prints the time at which each phase ended, in nanoseconds of the system's monotonic clock, as JSON. Every side imports
what it needs and nothing else, so the imports are in the functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

Stamp = Callable[[], None]  # ends a phase


class FirstToken:
    """A streamer that ends a phase when the first token comes. The prompt comes before it."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp, self._received = stamp, 0

    def put(self, value: Any) -> None:
        self._received += 1
        if self._received == 2:
            self._stamp()

    def end(self) -> None:
        pass


def hf_eager(path: str, ids: list[int], new: int, threads: int, stamp: Stamp) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    stamp()
    _generate(AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=False), ids, new, stamp)


def fused(path: str, ids: list[int], new: int, threads: int, stamp: Stamp) -> None:
    import torch

    from labkit.engine import init_inference

    torch.set_num_threads(threads)
    stamp()
    _generate(init_inference(path, dtype=torch.bfloat16), ids, new, stamp)


def _generate(model: Any, ids: list[int], new: int, stamp: Stamp) -> None:
    import torch

    stamp()
    prompt = torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=new, streamer=FirstToken(stamp), **options)
    stamp()


def llama_cpp(path: str, ids: list[int], new: int, threads: int, stamp: Stamp) -> None:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    stamp()
    model = Llama(path, n_ctx=len(ids) + new, n_threads=threads, n_threads_batch=threads, verbose=False)
    stamp()
    tokens = model.generate(ids, temp=0.0)
    next(tokens)
    stamp()
    for _ in range(new - 1):
        next(tokens)
    stamp()


WAYS = {"hf-eager": hf_eager, "fused": fused, "llama.cpp": llama_cpp}


def main() -> None:
    side, path, prompt, new, threads, *packages = sys.argv[1:]
    sys.path += packages
    stamps: list[int] = []
    ids = [97 * place % 251 for place in range(int(prompt))]  # in every vocabulary
    WAYS[side](path, ids, int(new), int(threads), lambda: stamps.append(monotonic_ns()))
    sys.stdout.write(json.dumps(stamps) + "\n")


if __name__ == "__main__":
    main()
