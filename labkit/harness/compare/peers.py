"""llama.cpp as a side of a comparison. It is a strong CPU runtime to measure against, and no dependency of labkit.

It is found when the interpreter named in LABKIT_LLAMA_CPP_PYTHON (unset: the running one) imports `llama_cpp`, and
LABKIT_LLAMA_CPP_SOURCES names the folder with llama.cpp's `convert_hf_to_gguf.py`. It computes in a worker like every
other side's, with the same weights, prompts, clock and threads, and otherwise with the settings it chooses itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.generation import BaseStreamer

from labkit.harness.compare.baselines import Baseline, comparison_device
from labkit.system.errors import RunError, UserError
from labkit.system.owned_folder import owned_folder
from labkit.weights.source import ModelSource

LLAMA_CPP = "llama.cpp"
LLAMA_CPP_INT8 = "llama.cpp-q8_0"  # int8 weights in groups of 32, whatever dtype the other sides have
PEERS = {LLAMA_CPP: None, LLAMA_CPP_INT8: "q8_0"}  # the converter's name of the type; None: that of the other sides
PYTHON, SOURCES = "LABKIT_LLAMA_CPP_PYTHON", "LABKIT_LLAMA_CPP_SOURCES"
CONVERTER = "convert_hf_to_gguf.py"
FIND = "import importlib.util as u; spec = u.find_spec('llama_cpp'); print(spec.origin if spec else '')"


def unavailable() -> str | None:
    """Why llama.cpp cannot be a side here, and what to do; None when it can."""
    if comparison_device().type != "cpu":
        return "llama.cpp is a side on CPUs only; hide the GPU with CUDA_VISIBLE_DEVICES=-1"
    python, sources = os.environ.get(PYTHON, sys.executable), os.environ.get(SOURCES)
    if _package(python) is None:
        return f"{python} does not import llama_cpp; set {PYTHON} to an interpreter that does"
    if sources is None or not Path(sources, CONVERTER).is_file():
        where = f"{SOURCES} is not set" if sources is None else f"{sources} holds no {CONVERTER}"
        return f"llama.cpp cannot convert a model: {where}; set {SOURCES} to the folder with its {CONVERTER}"
    return None


@contextmanager
def converted(name: str, model: str, *, dtype: str, seed: int) -> Iterator[Path]:
    """`model` as the GGUF file of a peer; the file is removed when the context ends. RunError: the converter failed."""
    with owned_folder("labkit-gguf-") as folder:
        target = folder / "model.gguf"
        arguments = [os.environ[SOURCES], model, str(seed), dtype, PEERS[name] or "", str(target)]
        command = [sys.executable, "-P", "-m", "labkit.harness.compare.gguf", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join(done.stderr.splitlines()[-12:])
            raise RunError(f"{name} could not convert {model} in {dtype}; is its converter up to date?\n{last}")
        yield target


def llama_cpp(
    name: str, gguf: str, source: ModelSource, dtype: torch.dtype, *, threads: int, positions: int
) -> Baseline:
    """llama.cpp with the weights of the file `gguf`, behind the interface of the baselines.

    `dtype` is that of the other sides' weights. The weights in the file have it too, unless the peer has its own.
    """
    model = LlamaCpp(gguf, source.hf_config, threads=threads, positions=positions)
    if PEERS[name] is None:
        return Baseline(name, model.impl, dtype, model, source.tokenizer)
    return Baseline(name, f"{model.impl}, {PEERS[name]}", torch.int8, model, source.tokenizer)


class LlamaCpp:
    """Generates one sequence greedily through llama.cpp's C interface, with one `llama_decode` for each token."""

    def __init__(self, gguf: str, config: PretrainedConfig, *, threads: int, positions: int) -> None:
        package = _package(os.environ.get(PYTHON, sys.executable))
        assert package is not None
        sys.path.append(str(package.parent))  # last: whatever is installed here comes first
        import llama_cpp as api  # type: ignore[import-not-found]

        model = api.llama_model_load_from_file(gguf.encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = positions
        settings.n_threads = settings.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, settings)
        if not self._context:
            raise RunError(f"llama.cpp cannot load {gguf}")
        self._api = api
        self.config = config
        self.impl = f"llama-cpp-python {api.__version__}, mapped weights, float16 KV cache"

    def generate(
        self, input_ids: torch.Tensor, *, streamer: BaseStreamer, max_new_tokens: int, **greedy: Any
    ) -> torch.Tensor:
        """`max_new_tokens` greedy tokens; the streamer gets each as it is known. An end of text does not end it."""
        if len(input_ids) != 1:
            raise UserError(f"got a batch of {len(input_ids)}, expected 1: {LLAMA_CPP} runs one sequence here")
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        streamer.put(input_ids)
        tokens = input_ids[0].tolist()
        unread = tokens
        for _ in range(max_new_tokens):
            unread = [self._next(unread)]
            tokens.extend(unread)
            streamer.put(torch.tensor(unread))
        streamer.end()
        return torch.tensor([tokens])

    def _next(self, unread: list[int]) -> int:
        api = self._api
        ids = (api.llama_token * len(unread))(*unread)
        if status := api.llama_decode(self._context, api.llama_batch_get_one(ids, len(unread))):
            raise RunError(f"llama_decode failed with status {status}")
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, -1), (self.config.vocab_size,))
        return int(logits.argmax())


@cache
def _package(python: str) -> Path | None:
    """The folder of `llama_cpp` as this interpreter finds it."""
    try:
        done = subprocess.run([python, "-I", "-c", FIND], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    origin = done.stdout.strip()
    return Path(origin).parent if origin else None
