"""What each rank of a pipeline does in the tests, called through `labkit.launch`: plain data comes back."""

import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cut_models import NEW, WAYS, prompts
from small_models import SMALL_CONFIGS, small_model
from torch import Tensor
from transformers import DynamicCache, TextStreamer

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.step import StepInput
from labkit.harness.compare.provider import Room
from labkit.harness.compare.providers import provider_of
from labkit.kernels.mailbox import Message, Ring

SCHEDULES = ("queue", "rounds", "barrier", "naive")
DEFAULT_ROWS = ("gpt2", "llama", "bloom")


def piped(name: str, pp_size: int, tp_size: int = 1, model: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine over the stages; other options of the pipeline under their own names."""
    own = {key: options.pop(key) for key in ("schedule", "micro_batches", "layers") if key in options}
    parallel: dict[str, Any] = {
        "tensor_parallel": {"tp_size": tp_size},
        "pipeline_parallel": {"pp_size": pp_size} | own,
    }
    made_of: dict[str, Any] = {"dtype": torch.float32, "impl": "cpp"} | parallel | options
    return labkit.init_inference(small_model(name, **(model or {})), **made_of)


def whole(name: str, **model: Any) -> Any:
    return labkit.init_inference(small_model(name, **model), dtype=torch.float32, impl="cpp")


def greedy(model: InferenceEngine, **options: Any) -> Any:
    ids, mask = prompts(model.model_config.vocab_size)
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **arguments)


def of_rows(names: tuple[str, ...], pp_size: int, tp_size: int = 1, **model: Any) -> dict[str, bool]:
    """Whether the tokens of texts of unequal lengths, in two micro-batches or more, are those of one process."""
    return {
        name: torch.equal(greedy(whole(name, **model)), greedy(piped(name, pp_size, tp_size, model))) for name in names
    }


def of_schedules() -> dict[str, bool]:
    """With rows that end at different steps, in micro-batches of one row, and of two and one."""
    alone, found = whole("llama"), {}
    text = greedy(alone)[:, -NEW:]
    ends = [int(text[0, 1]), int(text[1, 4])]
    wanted = greedy(alone, eos_token_id=ends)
    regrouped = ({"prompt": 3, "decode": 1}, {"prompt": 3, "decode": 2})
    for schedule in SCHEDULES:
        counts: tuple[Any, ...] = ("auto",) if schedule == "naive" else ("auto", 3)
        for count in (*counts, *regrouped) if schedule == "queue" else counts:
            engine = piped("llama", 2, schedule=schedule, micro_batches=count)
            found[f"{schedule}, {count}"] = torch.equal(greedy(engine, eos_token_id=ends), wanted)
            at_once = greedy(engine, eos_token_id=list(range(1, 131)))  # all rows end with their first token
            found[f"{schedule}, {count}, at once"] = at_once.shape[1] == prompts()[0].shape[1] + 1
    return found


def rows_that_leave() -> tuple[bool, set[int]]:
    """Whether texts that end one after the other, with padding and holes, are those of one process, of a model with
    ALiBi; how many rows steps had.
    """
    alone, engine = whole("bloom"), piped("bloom", 2, micro_batches={"prompt": 3, "decode": 2})
    ids = torch.randint(1, 131, (8, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[5, :2], mask[6, 3] = 0, 0, 0
    arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
    text = alone.generate(ids, **arguments)[:, 9:]
    arguments["eos_token_id"] = list(set(text[:, 2:].flatten().tolist()) - set(text[:, :2].flatten().tolist()))
    inner, rows = engine.module.runner.inner, set()

    def begin(step: StepInput) -> Any:
        rows.add(step.shape[0])
        return type(inner).begin(inner, step)

    with mock.patch.object(inner, "begin", begin):
        found = engine.generate(ids, **arguments)
    return torch.equal(found, alone.generate(ids, **arguments)), rows


def ways_to_generate() -> dict[str, bool]:
    """One batch at a time, whose ranks were seeded otherwise, twice: the second time the draws go on from the first."""
    alone, engine, found = whole("llama"), piped("llama", 2, schedule="naive"), {}
    ids, mask = prompts()
    for way in WAYS:
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0} | way
        torch.manual_seed(3)
        wanted = [alone.generate(ids, **arguments) for _ in range(2)]
        torch.manual_seed(3 + dist.get_rank())
        found[str(way)] = all(torch.equal(engine.generate(ids, **arguments), each) for each in wanted)
    return found


def other_calls() -> dict[str, bool]:
    """What gives more than tokens, on every rank."""
    alone, engine = whole("llama"), piped("llama", 2)
    ids, mask = prompts()
    kept: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    (one, many) = (greedy(model, **kept) for model in (alone, engine))
    streamer = mock.Mock(spec=TextStreamer)
    engine.generate(ids[:1], max_new_tokens=NEW, do_sample=False, pad_token_id=0, streamer=streamer)
    first = alone(ids, attention_mask=mask), engine(ids, attention_mask=mask)
    again = [
        model(ids[:, :1], past_key_values=out.past_key_values).logits
        for model, out in zip((alone, engine), first, strict=True)
    ]
    long = torch.randint(1, 131, (7, 150), generator=torch.Generator().manual_seed(2))  # of more rows than a chunk has
    chunked = [model.generate(long, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (alone, engine)]
    return {
        "logits": float((first[0].logits - first[1].logits)[mask.bool()].abs().max()) < 5e-5,
        "on a cache": float((again[0] - again[1]).abs().max()) < 5e-5,
        "scores": all(torch.allclose(*each, atol=5e-5) for each in zip(one.scores, many.scores, strict=True)),
        "sequences": torch.equal(one.sequences, many.sequences),
        "streamed": streamer.put.call_count == NEW + 1,
        "long": torch.equal(*chunked),
    }


def low_precision() -> dict[str, bool]:
    """Rows go from stage to stage as they are, so that one batch at a time gives the very logits of one process."""
    ids, mask = prompts()
    found = {}
    for dtype in (torch.bfloat16, torch.int8):
        options: dict[str, Any] = {"dtype": dtype, "impl": "cpp"}
        alone = labkit.init_inference(small_model("llama"), **options)
        engine = piped("llama", 2, **options)
        found[str(dtype)] = torch.equal(*(model(ids, attention_mask=mask).logits for model in (alone, engine)))
    return found


def from_checkpoint(folder: str) -> dict[str, bool]:
    """Of a checkpoint that one process has saved, and of a GGUF file: each stage reads its layers."""
    found = {}
    for path in ("whole", "model.gguf"):
        source, ids = labkit.resolve(f"{folder}/{path}"), torch.tensor([[5, 77, 100, 12, 9, 41]] * 2)
        engines = (labkit.init_inference(source, **stages) for stages in ({}, {"pipeline_parallel": {"pp_size": 2}}))
        found[path] = torch.equal(*(each.generate(ids, max_new_tokens=6, do_sample=False) for each in engines))
    return found


def by_gloo() -> tuple[bool, str]:
    with mock.patch("labkit.kernels.shared_memory.system", return_value=(str(dist.get_rank()),)):
        engine = piped("gptj", 2)
    return torch.equal(greedy(whole("gptj")), greedy(engine)), engine.pipeline.ring.transport


def taken_late() -> list[int]:
    """What rank 1, which is slow to receive, gathers with a rank that drops its mailbox as soon as it has its part."""
    ring = Ring(None, transport="gloo")
    receive = ring.receive

    def received() -> Message:
        time.sleep(0.3 * dist.get_rank())
        return receive()

    with mock.patch.object(ring, "receive", received):
        found: list[int] = ring.gather(torch.tensor([dist.get_rank() + 7])).flatten().tolist()
    return found


def held_bytes(found: object) -> int:
    """Of all tensors in a record of records, each memory counted once."""
    memories: dict[int, int] = {}

    def look(at: object) -> None:
        if isinstance(at, Tensor):
            memories[at.data_ptr()] = at.nbytes
        elif is_dataclass(at):
            for field in fields(at):
                look(getattr(at, field.name))
        elif isinstance(at, tuple | list):
            for each in at:
                look(each)

    look(found)
    return sum(memories.values())


def memory() -> tuple[int, int]:
    """Bytes of the weights that are here, and of the whole model's."""
    shape: dict[str, Any] = {"num_hidden_layers": 16, "intermediate_size": 300, "tie_word_embeddings": False}
    return held_bytes(piped("llama", 2, model=shape).weights), held_bytes(whole("llama", **shape).weights)


def said(function: Any) -> str:
    try:
        function()
    except (RuntimeError, ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes() -> dict[str, str]:
    """What this rank is told when something is wrong; each time all go on together."""
    rank, ids = dist.get_rank(), prompts()[0]
    engine = piped("llama", 2)
    inner = engine.module.runner.inner
    calls = 0

    def fails(step: StepInput) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ValueError("the fourth step is too much")
        return type(inner).begin(inner, step)

    def failing_on(which: int) -> str:
        with mock.patch.object(inner, "begin", fails) if rank == which else mock.MagicMock():
            return said(lambda: greedy(engine))

    def damaged() -> str:
        weights = engine.weights.final_norm.weight if engine.pipeline.is_last else torch.zeros(1)
        kept = weights.clone()
        weights.fill_(torch.nan)
        try:
            return said(lambda: greedy(engine))
        finally:
            weights.copy_(kept)

    two: Any = {"pp_size": 2}
    with torch.inference_mode():
        broken = damaged()
    found = {
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
        "weights": said(lambda: labkit.init_inference(small_model("gpt2", seed=5 + rank), pipeline_parallel=two)),
        "not a number": broken,
        "first fails": failing_on(0),
    }
    calls = 0
    found["last fails"] = failing_on(1)
    calls = 3
    with mock.patch.object(inner, "begin", fails) if rank == 0 else mock.MagicMock():
        found["step fails"] = said(lambda: engine(ids))
    return found | {"equal": str(torch.equal(greedy(engine), greedy(whole("llama"))))}


def spans() -> tuple[list[tuple[str, int, int]], bool]:
    """(kind, micro-batch, step) of a text of three tokens; whether they follow each other on this rank's clock."""
    engine = piped("llama", 2)
    engine.pipeline.take_spans()
    greedy(engine, max_new_tokens=3)
    taken = engine.pipeline.take_spans()
    in_order = all(before.end_ns <= after.end_ns for before, after in pairwise(taken))
    assert {each.pp_rank for each in taken} == {dist.get_rank()}
    return [(each.kind, each.micro_batch, each.step) for each in taken], in_order


def two_stages(folder: str, *others: Callable[[], Any]) -> dict[str, Any]:
    """What is found, by name, the findings of the others with it."""
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
    } | {each.__name__: each() for each in others}


def every_row(pp_size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"rows": of_rows(tuple(SMALL_CONFIGS), pp_size)}


def two_by_two() -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = of_rows(("llama",), 2, 2)
    engine, alone = piped("llama", 2, 2, schedule="naive"), whole("llama")
    ids, mask = prompts()
    torch.manual_seed(3)
    wanted = alone.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=True)
    torch.manual_seed(3 + dist.get_rank())
    found = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=True)
    other = said(lambda: engine.generate(ids // (1 + (dist.get_rank() == 1)), max_new_tokens=2))
    return {"rows": rows, "sampled": torch.equal(found, wanted), "prompt": other}


def lost(folder: str, how: int, which: int) -> None:
    """One rank is stopped or killed while a text is under way."""
    import os

    engine = piped("llama", 2)
    inner = engine.module.runner.inner
    steps = 0

    def begin(step: StepInput) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            Path(folder, "lost").touch()
            os.kill(os.getpid(), how)
        return type(inner).begin(inner, step)

    with mock.patch.object(inner, "begin", begin) if dist.get_rank() == which else mock.MagicMock():
        greedy(engine)


def without_padding(model: Any) -> Any:
    """What vanilla or a side generates; with padding transformers' pipeline gives other tokens than one process."""
    ids = torch.arange(40, 49).repeat(3, 1) + torch.arange(3)[:, None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)


def of_transformers(folder: str) -> dict[str, Any]:
    """What a rank of transformers' pipeline holds and generates."""
    provider = provider_of("hf-pipeline")
    assert provider is not None
    side = provider.load("hf-pipeline", Path(folder), labkit.resolve("tiny-llama"), torch.float32, Room(1, 3, 9, 17))
    held = sum(each.numel() for each in side.model.parameters())
    return {"tokens": without_padding(side), "held": held, "impl": side.impl}
