"""One side of a comparison in a process of its own: `python -P -m labkit.harness.compare.worker`.

Requests are lines of JSON on stdin. Each gets one line of answer on the stdout that the process started with; the
prints of libraries go to stderr. The worker ends when stdin does, because its parent is then done or dead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, time
from typing import Any, TextIO

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers.utils import logging

from labkit.harness.compare.installation import PROTOCOL
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.loader import FolderLoader, Room, load_side, loader_of
from labkit.harness.compare.placement import PeakMemory, Placement
from labkit.harness.exchange.calls import ExchangeCalls
from labkit.harness.expert_reads import ExpertReads
from labkit.harness.hosted_work import matrix_numbers
from labkit.harness.stored_weights import as_plain
from labkit.harness.timing import TokenClock, collector_paused, timed_generate, wait_for_gpu
from labkit.harness.turns.pages import large_tensors
from labkit.harness.turns.placing import copy_files_anew
from labkit.harness.turns.turn_streamer import LeftError, TurnStreamer
from labkit.kernels.expert_store import ExpertCounts
from labkit.kernels.memory import return_freed_memory
from labkit.models.chat_template import render
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

QUESTION_TOKENS = 256  # the longest question, in its chat template
RELOADED_TOKENS = 3  # of the untimed run after a side was loaded again
UNTIMED_SEED = 2**40  # of a prompt that no timed run has
OPERATIONS = (  # methods of the worker that answer a request of this name
    *("prepare", "load", "run", "weight_blocks", "begin", "stages", "answer", "peak_memory", "reading"),
    *("open_exchange", "time_exchange"),
)
MEETING = timedelta(minutes=10)  # how long the ranks wait for the slowest to load


class Worker:
    """Loads one side and generates with it, on request. Every method returns plain JSON data."""

    def __init__(self, exchange: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """exchange: sends an answer, and returns the next request."""
        self._exchange = exchange
        self._started_s = time() - psutil.Process().create_time()

    def prepare(
        self,
        *,
        name: str,
        model: str,
        dtype: str,
        seed: int,
        options: dict[str, Any],
        join: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Takes all memory that the side needs besides its weights and its work: imports, kernels, the model's
        description and the tokenizer. From here on its memory is counted, and may be limited. Returns the protocol, the
        file of the labkit that works here, and that it can sample.

        `options` are options of `init_inference` that divide the model. `join` has the rank of this process, the number
        of the side's ranks and their rendezvous.
        """
        self._requested = perf_counter()
        self._name, self._seed, self._dtype = name, seed, FLOAT_DTYPES[dtype]
        self._source = resolve(model, seed=seed, any_architecture=True)  # the parent has checked it already
        _ = self._source.tokenizer
        self._options = options
        if join is not None:
            _join(join)
        loader_of(name).get_ready(name, self._dtype)
        return_freed_memory()
        self._device = comparison_device()
        self._peak = PeakMemory(self._device)
        return {"protocol": PROTOCOL, "imported": sys.modules["labkit"].__file__, "samples": True}

    def load(
        self,
        *,
        batch: int,
        prompt: int,
        new: int,
        threads: int,
        warm_up: int | None = None,
        converted: str | None = None,
        answer_tokens: int = 0,
        memory_gb: float | None = None,
        sample: str = "",
    ) -> dict[str, Any]:
        """Loads the weights of the prepared side and warms up, with `warm_up` new tokens (None: `new`).

        answer_tokens: tokens of a later answer; 0: no answer. memory_gb: the side's memory limit. sample: settings of
        sampling; empty: greedy search.
        """
        self._sample = sample
        self._shape, self._new = (batch, prompt), new
        positions = max(prompt + new, QUESTION_TOKENS + answer_tokens) if answer_tokens else prompt + new
        self._room = Room(threads, batch, prompt, positions, memory_gb)
        self._folder = None if converted is None else Path(converted)
        started = perf_counter()
        self._load()
        loaded = perf_counter()
        self._warm_up(warm_up or new)
        warm = perf_counter()
        self.placement = Placement(large_tensors(), self._peak)
        gc.collect()
        gc.freeze()  # so that the collections before the runs take no time
        numbers = matrix_numbers(self._side.model)
        return {
            "impl": self._side.impl,
            "pauses": self._side.pauses,
            "pauses_to_move": self._pauses_to_move,
            "weights": as_plain(self._side.weights),
            "matrix_numbers": None if numbers is None else numbers.model_dump(),
            "load_s": loaded - started,
            "first_run_s": warm - loaded,
            "start_to_ready_s": self._started_s + warm - self._requested,  # without the time in which other sides load
            "nodes": self._side.graph_nodes,
            "replaced": self._side.replaced,
            "streamed_mb": self._side.streamed_bytes / 1e6,
        }

    def _load(self) -> None:
        """Loads the side from its files, or from the vanilla weights."""
        loader = loader_of(self._name)
        if isinstance(loader, FolderLoader):
            assert self._folder is not None
            self._side = loader.load(self._name, self._folder, self._source, self._dtype, self._room)
        else:
            self._side = load_side(self._name, self._source, self._dtype, self._room.threads, **self._options)
        self._generation_args = self._side.arguments(*self._shape, self._sample)
        wait_for_gpu()

    def _warm_up(self, tokens: int, seed: int | None = None) -> None:
        new, self._new = self._new, tokens
        self.run(seed=self._seed if seed is None else seed)
        self._new = new

    def run(self, *, seed: int) -> dict[str, Any]:
        """Generates from the prompt of this seed. Returns the times, and the new tokens of each sequence."""
        prompt, arguments = self._generation(seed)
        store, at_first = self._side.expert_store, list[ExpertCounts]()
        times, sequences = timed_generate(
            self._side,
            prompt,
            stamps_ns=self._side.stamps_ns,
            at_first=None if store is None else lambda: at_first.append(store.counts),
            **arguments,
        )
        self._side.rest()
        reads = ExpertReads.of(store.counts.since(at_first[0])).model_dump() if store and at_first else None
        return {"times": asdict(times), "tokens": sequences[:, self._shape[1] :].tolist(), "experts": reads}

    def begin(self, *, seed: int) -> dict[str, Any]:
        """Generates from the prompt of this seed in turns, the first of which ends with the first token.

        `TurnStreamer` describes the answers and the requests between the turns. The generation ends with a turn or with
        another request, and in both cases without leaving anything behind.
        """
        prompt, arguments = self._generation(seed)
        with collector_paused():
            streamer = TurnStreamer(self._end_turn)
            self._side.generate(prompt, streamer=streamer, **arguments)
        return streamer.taken()

    def place(self) -> dict[str, Any]:
        """Puts the weights into new memory. A library that keeps them in memory of its own loads them again, from a new
        copy of its files. Returns whether they lie in new memory now; on a GPU they stay in their place.
        """
        if self._device.type != "cpu":
            return {"placed": False}
        if self._side.in_tensors:
            return self.placement.place()
        with self._peak.paused():
            return {"placed": self._load_again()}

    def weight_blocks(self) -> dict[str, Any]:
        """The blocks of the weights, for another process that may have the same; or why they cannot be shared."""
        if self._device.type != "cpu" or not self._side.in_tensors:
            return {"blocks": [], "why_not": "weights on a GPU, or in memory of another library, cannot be shared"}
        return self.placement.blocks(lambda: self._warm_up(RELOADED_TOKENS, seed=UNTIMED_SEED))

    def _load_again(self) -> bool:
        gc.unfreeze()
        del self._side
        gc.collect()  # the library frees its memory
        if self._folder is not None:
            copy_files_anew(self._folder)
        self._load()
        self._warm_up(RELOADED_TOKENS)
        return True

    def _generation(self, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The prompt of this seed, and the other arguments of `generate`. The ranks leave this function together."""
        prompt = np.random.default_rng(seed).integers(0, self._side.config.vocab_size, self._shape)
        if dist.is_initialized():
            dist.barrier()
        if self._sample:
            torch.manual_seed(seed)
        return torch.from_numpy(prompt), self._generation_args | {"max_new_tokens": self._new}

    def _end_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Answers with a turn, once nothing of this side is at work, and waits for the next request. Weights may move
        while the generation pauses.
        """
        self._side.rest()
        request = self._exchange(turn)
        while self._pauses_to_move and request["op"] in self.moves:
            arguments = {name: value for name, value in request.items() if name != "op"}
            request = self._exchange(self.moves[request["op"]](**arguments))
        return request

    @property
    def moves(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """The requests that put the weights into new memory."""
        return {
            "place": self.place,
            "publish": lambda **request: self.placement.publish(**request),
            "adopt": lambda **request: self.placement.adopt(**request),
        }

    @property
    def _pauses_to_move(self) -> bool:
        """Whether a generation of this side can go on with weights in new memory. It cannot where another library holds
        the weights, because they are loaded again; and not with layers on a disk, because a read may be on its way.
        """
        return self._side.in_tensors and not self._side.streamed_bytes and self._side.expert_store is None

    def stages(self, *, seed: int) -> dict[str, Any]:
        """Generates once more with timed stages. Returns the stages, and the times of that run."""
        runs: list[dict[str, Any]] = []
        stages = self._side.stage_times(lambda: runs.append(self.run(seed=seed)))
        return {"stages": [asdict(stage) for stage in stages], "times": runs[0]["times"] if stages else None}

    def answer(self, *, question: str, new: int) -> dict[str, Any]:
        """The greedy answer to a question, in at most `new` tokens; None where the tokenizer has no chat template.
        UserError for a question that is too long.
        """
        tokenizer = self._side.tokenizer
        if tokenizer.chat_template is None:
            return {"text": None}
        messages = [{"role": "user", "content": question}]
        ids = render(tokenizer, messages)
        if ids.shape[1] > QUESTION_TOKENS:
            raise UserError(f"got a question of {ids.shape[1]} tokens, expected at most {QUESTION_TOKENS}")
        arguments = self._side.arguments(1, ids.shape[1]) | {"max_new_tokens": new, "streamer": TokenClock()}
        tokens = self._side.generate(ids, **arguments)[0, ids.shape[1] :].tolist()
        ends = self._source.ends  # not every side stops at them by itself
        tokens = list(takewhile(lambda token: token not in ends, tokens))
        return {"text": tokenizer.decode(tokens, skip_special_tokens=True).strip()}

    def peak_memory(self) -> dict[str, Any]:
        """Peak bytes of the process on its device, without the bytes that it held before it loaded the weights."""
        return {"bytes": self._peak.bytes}

    def reading(self) -> dict[str, Any]:
        """How the latest decode steps read the weights; empty for sides with a single way."""
        return {"reading": self._side.reading}

    def open_exchange(self, *, sizes: list[int], join: dict[str, Any]) -> dict[str, Any]:
        """Joins the other ranks without a model, for `time_exchange`."""
        torch.set_num_threads(1)
        _join(join)
        self._calls = ExchangeCalls(sizes)
        return {"transport": self._calls.exchange.transport}

    def time_exchange(self, *, calls: int, seed: int) -> dict[str, Any]:
        """One round of sums over the ranks."""
        return {"blocks": self._calls.round(calls=calls, seed=seed)}


def _join(join: dict[str, Any]) -> None:
    meeting = {"init_method": join["rendezvous"], "rank": join["rank"], "world_size": join["ranks"]}
    dist.init_process_group("gloo", timeout=MEETING, **meeting)


def main() -> None:
    """Answers requests until stdin ends."""
    replies = _claim_stdout()
    logging.set_verbosity_error()
    requests = _read_requests()

    def exchange(answer: dict[str, Any]) -> dict[str, Any]:
        _send(replies, answer)
        return requests.get()

    worker = Worker(exchange)
    operations = worker.moves | {name: getattr(worker, name) for name in OPERATIONS}
    request = requests.get()
    while True:
        try:
            reply = operations[request.pop("op")](**request)
        except LeftError as left:
            request = left.request
            continue
        except Exception as error:
            users = isinstance(error, UserError) or (isinstance(error, OSError) and error.filename is not None)
            _send(replies, {"error": type(error).__name__, "message": str(error), "users": users})
            raise
        request = exchange(reply)


def _claim_stdout() -> TextIO:
    """The stdout that the parent reads. From now on, prints go to stderr."""
    claimed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return claimed


def _read_requests() -> SimpleQueue[dict[str, Any]]:
    """Requests as they come. The end of stdin ends the process at once, even in the middle of a run."""
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return requests


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
