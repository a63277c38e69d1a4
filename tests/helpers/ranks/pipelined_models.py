"""What each rank of a pipeline does in the tests. `labkit.launch` calls these functions and returns plain data."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.models.small_models import SMALL_CONFIGS, small_model
from helpers.ranks.cut_models import NEW, WAYS, prompts
from torch import Tensor
from transformers import DynamicCache, TextStreamer

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.step import StepInput
from labkit.harness.compare.loader import FolderLoader, Room, loader_of
from labkit.kernels.mailbox import Message, Ring

SCHEDULES = ("queue", "rounds", "barrier", "naive")
DEFAULT_ROWS = ("gpt2", "llama", "bloom")


def piped(name: str, pp_size: int, tp_size: int = 1, model: dict[str, Any] | None = None, **options: Any) -> Any:
    """Engine over the pipeline stages; options of the pipeline keep their names."""
    pipeline = {key: options.pop(key) for key in ("schedule", "micro_batches", "layers") if key in options}
    parallel: dict[str, Any] = {
        "tensor_parallel": {"tp_size": tp_size},
        "pipeline_parallel": {"pp_size": pp_size} | pipeline,
    }
    arguments: dict[str, Any] = {"dtype": torch.float32, "impl": "cpp"} | parallel | options
    return labkit.init_inference(small_model(name, **(model or {})), **arguments)


def whole(name: str, **model: Any) -> Any:
    return labkit.init_inference(small_model(name, **model), dtype=torch.float32, impl="cpp")


def greedy(model: InferenceEngine, **options: Any) -> Any:
    ids, mask = prompts(model.model_config.vocab_size)
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **arguments)


def of_rows(names: tuple[str, ...], pp_size: int, tp_size: int = 1, **model: Any) -> dict[str, bool]:
    """Whether tokens of texts of unequal lengths, in two micro-batches or more, match a single process."""
    return {
        name: torch.equal(greedy(whole(name, **model)), greedy(piped(name, pp_size, tp_size, model))) for name in names
    }


def of_schedules() -> dict[str, bool]:
    """Rows end at different steps, in micro-batches of one row, and of two rows and one row."""
    single_process, equal = whole("llama"), {}
    text = greedy(single_process)[:, -NEW:]
    ends = [int(text[0, 1]), int(text[1, 4])]
    expected = greedy(single_process, eos_token_id=ends)
    regrouped = ({"prompt": 3, "decode": 1}, {"prompt": 3, "decode": 2})
    for schedule in SCHEDULES:
        counts: tuple[Any, ...] = ("auto",) if schedule == "naive" else ("auto", 3)
        for count in (*counts, *regrouped) if schedule == "queue" else counts:
            engine = piped("llama", 2, schedule=schedule, micro_batches=count)
            equal[f"{schedule}, {count}"] = torch.equal(greedy(engine, eos_token_id=ends), expected)
            at_once = greedy(engine, eos_token_id=list(range(1, 131)))  # all rows end with their first token
            equal[f"{schedule}, {count}, at once"] = at_once.shape[1] == prompts()[0].shape[1] + 1
    return equal


def rows_that_leave() -> tuple[bool, set[int]]:
    """Whether a model with ALiBi matches a single process when texts with padding and holes end one after the other;
    and the numbers of rows in its steps.
    """
    single_process, engine = whole("bloom"), piped("bloom", 2, micro_batches={"prompt": 3, "decode": 2})
    ids = torch.randint(1, 131, (8, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[5, :2], mask[6, 3] = 0, 0, 0
    arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
    text = single_process.generate(ids, **arguments)[:, 9:]
    arguments["eos_token_id"] = list(set(text[:, 2:].flatten().tolist()) - set(text[:, :2].flatten().tolist()))
    inner, rows = engine.module.runner.inner, set()

    def begin(step: StepInput) -> Any:
        rows.add(step.shape[0])
        return type(inner)._begin(inner, step)

    with mock.patch.object(inner, "_begin", begin):
        generated = engine.generate(ids, **arguments)
    return torch.equal(generated, single_process.generate(ids, **arguments)), rows


def ways_to_generate() -> dict[str, bool]:
    """Samples twice with one batch at a time and other seeds per rank; the second draw continues the first."""
    single_process, engine, equal = whole("llama"), piped("llama", 2, schedule="naive"), {}
    ids, mask = prompts()
    for options in WAYS:
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0} | options
        torch.manual_seed(3)
        expected = [single_process.generate(ids, **arguments) for _ in range(2)]
        torch.manual_seed(3 + dist.get_rank())
        equal[str(options)] = all(torch.equal(engine.generate(ids, **arguments), text) for text in expected)
    return equal


def other_calls() -> dict[str, bool]:
    """Calls that return more than tokens, on every rank."""
    single_process, engine = whole("llama"), piped("llama", 2)
    ids, mask = prompts()
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    (expected, actual) = (greedy(model, **options) for model in (single_process, engine))
    streamer = mock.Mock(spec=TextStreamer)
    engine.generate(ids[:1], max_new_tokens=NEW, do_sample=False, pad_token_id=0, streamer=streamer)
    first = single_process(ids, attention_mask=mask), engine(ids, attention_mask=mask)
    continued = [
        model(ids[:, :1], past_key_values=out.past_key_values).logits
        for model, out in zip((single_process, engine), first, strict=True)
    ]
    long = torch.randint(1, 131, (7, 150), generator=torch.Generator().manual_seed(2))  # has more rows than a chunk
    chunked = [
        model.generate(long, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (single_process, engine)
    ]
    return {
        "logits": float((first[0].logits - first[1].logits)[mask.bool()].abs().max()) < 5e-5,
        "on a cache": float((continued[0] - continued[1]).abs().max()) < 5e-5,
        "scores": all(torch.allclose(*pair, atol=5e-5) for pair in zip(expected.scores, actual.scores, strict=True)),
        "sequences": torch.equal(expected.sequences, actual.sequences),
        "streamed": streamer.put.call_count == NEW + 1,
        "long": torch.equal(*chunked),
    }


def low_precision() -> dict[str, bool]:
    """Rows keep their precision between stages, so one batch at a time gives exactly the single-process logits."""
    ids, mask = prompts()
    equal = {}
    for dtype in (torch.bfloat16, torch.int8):
        options: dict[str, Any] = {"dtype": dtype, "impl": "cpp"}
        single_process = labkit.init_inference(small_model("llama"), **options)
        engine = piped("llama", 2, **options)
        equal[str(dtype)] = torch.equal(*(model(ids, attention_mask=mask).logits for model in (single_process, engine)))
    return equal


def from_checkpoint(folder: str) -> dict[str, bool]:
    """A checkpoint saved by one process, and a GGUF file: each stage reads its own layers."""
    equal = {}
    for path in ("whole", "model.gguf"):
        source, ids = labkit.resolve(f"{folder}/{path}"), torch.tensor([[5, 77, 100, 12, 9, 41]] * 2)
        engines = (labkit.init_inference(source, **stages) for stages in ({}, {"pipeline_parallel": {"pp_size": 2}}))
        equal[path] = torch.equal(*(engine.generate(ids, max_new_tokens=6, do_sample=False) for engine in engines))
    return equal


def by_gloo() -> tuple[bool, str]:
    with mock.patch("labkit.kernels.shared_memory.system", return_value=(str(dist.get_rank()),)):
        engine = piped("gptj", 2)
    return torch.equal(greedy(whole("gptj")), greedy(engine)), engine.pipeline.ring.transport


def taken_late() -> list[int]:
    """Result of a gather on rank 1, which receives slowly, while the other rank drops its mailbox early."""
    ring = Ring(None, transport="gloo")
    receive = ring.receive

    def receive_late() -> Message:
        time.sleep(0.3 * dist.get_rank())
        return receive()

    with mock.patch.object(ring, "receive", receive_late):
        parts: list[int] = ring.gather(torch.tensor([dist.get_rank() + 7])).flatten().tolist()
    return parts


def held_bytes(record: object) -> int:
    """Bytes of all tensors in a nested record, with each memory counted once."""
    memories: dict[int, int] = {}

    def visit(node: object) -> None:
        if isinstance(node, Tensor):
            memories[node.data_ptr()] = node.nbytes
        elif is_dataclass(node):
            for field in fields(node):
                visit(getattr(node, field.name))
        elif isinstance(node, tuple | list):
            for item in node:
                visit(item)

    visit(record)
    return sum(memories.values())


def memory() -> tuple[int, int]:
    """Bytes of the weights on this rank, and of the whole model."""
    shape: dict[str, Any] = {"num_hidden_layers": 16, "intermediate_size": 300, "tie_word_embeddings": False}
    return held_bytes(piped("llama", 2, model=shape).weights), held_bytes(whole("llama", **shape).weights)


def said(function: Any) -> str:
    """Type and message of the error that the call raises, or "nothing"."""
    try:
        function()
    except (RuntimeError, ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes() -> dict[str, str]:
    """Message on this rank for each mistake; all ranks work again after it."""
    rank, ids = dist.get_rank(), prompts()[0]
    engine = piped("llama", 2)
    inner = engine.module.runner.inner
    calls = 0

    def begin_or_fail(step: StepInput) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ValueError("the fourth step is too much")
        return type(inner)._begin(inner, step)

    def failing_on(failing_rank: int) -> str:
        with mock.patch.object(inner, "_begin", begin_or_fail) if rank == failing_rank else nullcontext():
            return said(lambda: greedy(engine))

    def damaged() -> str:
        weights = engine.weights.final_norm.weight if engine.pipeline.is_last else torch.zeros(1)
        original = weights.clone()
        weights.fill_(torch.nan)
        try:
            return said(lambda: greedy(engine))
        finally:
            weights.copy_(original)

    pipeline_options: Any = {"pp_size": 2}
    with torch.inference_mode():
        broken = damaged()
    messages = {
        "prompt": said(lambda: engine.generate(ids // (1 + rank), max_new_tokens=2)),
        "arguments": said(lambda: greedy(engine, max_new_tokens=2 + rank)),
        "beams": said(lambda: greedy(engine, max_new_tokens=2 + rank, num_beams=2)),
        "forward": said(lambda: engine(ids[:, : 5 + rank])),
        "vocabulary": said(lambda: engine.generate(ids + 131, max_new_tokens=2)),
        "many": said(lambda: greedy(piped("llama", 2, micro_batches=4))),
        "world": said(lambda: piped("llama", 3)),
        "stages": said(lambda: piped("llama", 4)),
        "hidden": said(lambda: engine(ids, output_hidden_states=True)),
        "cache": said(lambda: engine.generate(ids, past_key_values=DynamicCache(), max_new_tokens=2)),
        "weights": said(
            lambda: labkit.init_inference(small_model("gpt2", seed=5 + rank), pipeline_parallel=pipeline_options)
        ),
        "not a number": broken,
        "first fails": failing_on(0),
    }
    calls = 0
    messages["last fails"] = failing_on(1)
    calls = 3
    with mock.patch.object(inner, "_begin", begin_or_fail) if rank == 0 else nullcontext():
        messages["step fails"] = said(lambda: engine(ids))
    return messages | {"equal": str(torch.equal(greedy(engine), greedy(whole("llama"))))}


def spans() -> tuple[list[tuple[str, int, int]], bool]:
    """(kind, micro-batch, step) of spans for a text of three tokens; whether they are in order on this rank."""
    engine = piped("llama", 2)
    engine.pipeline.take_spans()
    greedy(engine, max_new_tokens=3)
    recorded = engine.pipeline.take_spans()
    in_order = all(before.end_ns <= after.end_ns for before, after in pairwise(recorded))
    assert {span.pp_rank for span in recorded} == {dist.get_rank()}
    return [(span.kind, span.micro_batch, span.step) for span in recorded], in_order


def two_stages(folder: str, *others: Callable[[], Any]) -> dict[str, Any]:
    """Results by name, with the results of `others`."""
    torch.set_num_threads(1)
    return {
        "rows": of_rows(DEFAULT_ROWS, 2),
        "schedules": of_schedules(),
        "leaving": rows_that_leave(),
        "ways": ways_to_generate(),
        "other calls": other_calls(),
        "low precision": low_precision(),
        "checkpoints": from_checkpoint(folder),
        "gloo": by_gloo(),
        "taken late": taken_late(),
        "reference": {"gpt2": torch.equal(greedy(whole("gpt2")), greedy(piped("gpt2", 2, impl="reference")))},
        "memory": memory(),
        "mistakes": mistakes(),
        "spans": spans(),
    } | {function.__name__: function() for function in others}


def every_row(pp_size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"rows": of_rows(tuple(SMALL_CONFIGS), pp_size)}


def two_by_two() -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = of_rows(("llama",), 2, 2)
    engine, single_process = piped("llama", 2, 2, schedule="naive"), whole("llama")
    ids, mask = prompts()
    torch.manual_seed(3)
    expected = single_process.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=True)
    torch.manual_seed(3 + dist.get_rank())
    generated = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=True)
    message = said(lambda: engine.generate(ids // (1 + (dist.get_rank() == 1)), max_new_tokens=2))
    return {"rows": rows, "sampled": torch.equal(generated, expected), "prompt": message}


def lost(folder: str, signal_number: int, lost_rank: int) -> None:
    """Stops or kills one rank while a text is generated."""
    engine = piped("llama", 2)
    inner = engine.module.runner.inner
    steps = 0

    def begin(step: StepInput) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            Path(folder, "lost").touch()
            os.kill(os.getpid(), signal_number)
        return type(inner)._begin(inner, step)

    with mock.patch.object(inner, "_begin", begin) if dist.get_rank() == lost_rank else nullcontext():
        greedy(engine)


def without_padding(model: Any) -> Any:
    """Tokens of a vanilla model or a side. With padding transformers' pipeline gives other tokens than one process."""
    ids = torch.arange(40, 49).repeat(3, 1) + torch.arange(3)[:, None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)


def of_transformers(folder: str) -> dict[str, Any]:
    """Tokens of a rank of transformers' pipeline, and the number of weights on it."""
    loader = loader_of("hf-pipeline")
    assert isinstance(loader, FolderLoader)
    side = loader.load("hf-pipeline", Path(folder), labkit.resolve("tiny-llama"), torch.float32, Room(1, 3, 9, 17))
    size = sum(parameter.numel() for parameter in side.model.parameters())
    return {"tokens": without_padding(side), "held": size, "impl": side.impl}
