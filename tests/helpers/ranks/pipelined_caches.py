"""What each rank of a pipeline with an offloaded KV cache does. `labkit.launch` calls these functions."""

import errno
import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.models.offloaded import WRITE, able_only_to, descriptors
from helpers.models.small_models import small_model
from helpers.ranks.pipelined_models import SCHEDULES, piped, said, whole
from torch import Tensor

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.step import StepInput
from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.kernels.cache_stream import CacheStream
from labkit.kernels.memory import return_freed_memory

ROWS, NEW = 8, 24
DIVIDED_ANEW = {"prompt": 3, "decode": 2}


def on_disk(name: str, folder: Path, pp_size: int, tp_size: int = 1, **options: Any) -> Any:
    return piped(name, pp_size, tp_size, kv_offload={"path": folder, "slots": 2}, **options)


def texts(single_process: InferenceEngine) -> tuple[Tensor, dict[str, Any]]:
    """Prompts of unequal lengths, one with a hole. Their texts end at different steps, some with their first token."""
    ids = torch.randint(
        1, single_process.model_config.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(4)
    )
    mask = torch.ones_like(ids)
    mask[1, :4], mask[5, :2], mask[6, 3] = 0, 0, 0
    arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW}
    text = single_process.generate(ids, **arguments)[:, 9:]
    ends = {int(text[row, step]) for row, step in ((0, 0), (2, 2), (3, 3), (4, 8), (7, 5))}
    return ids, arguments | {"eos_token_id": list(ends)}


def equal_tokens(names: tuple[str, ...], folder: Path, pp_size: int, tp_size: int = 1, **options: Any) -> list[str]:
    """Models whose tokens differ from a single process with everything in memory."""
    different = []
    for name in names:
        single_process = whole(name)
        ids, arguments = texts(single_process)
        engine = on_disk(name, folder, pp_size, tp_size, **options)
        if not torch.equal(engine.generate(ids, **arguments), single_process.generate(ids, **arguments)):
            different.append(f"{name}, {options}")
    return different


def of_schedules(folder: Path, pp_size: int, tp_size: int, counts: tuple[Any, ...]) -> list[str]:
    """Schedules and micro-batches whose tokens differ from a single process."""
    different = equal_tokens(("llama",), folder, pp_size, tp_size, schedule="naive")
    for schedule in SCHEDULES[:3]:
        for count in (*counts, DIVIDED_ANEW, {"prompt": 4, "decode": 1}) if schedule == "queue" else counts:
            different += equal_tokens(("llama",), folder, pp_size, tp_size, schedule=schedule, micro_batches=count)
    return different


def other_calls(folder: Path) -> dict[str, bool]:
    """Whether beams, a prompt longer than a piece, an int8 cache, and `forward` on a returned cache are right."""
    single_process, engine = whole("llama"), on_disk("llama", folder, 2)
    ids, _ = texts(single_process)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    long = torch.randint(1, 131, (7, 150), generator=torch.Generator().manual_seed(2))
    int8_models = [labkit.init_inference(small_model("llama"), kv_dtype=torch.int8), on_disk_in_int8(folder)]
    models = (single_process, engine)
    logits = [model(ids[:, 8:], past_key_values=model(ids[:, :8]).past_key_values).logits for model in models]
    return {
        "beams": torch.equal(*(model.generate(ids[:2], num_beams=3, **options) for model in models)),
        "long": torch.equal(*(model.generate(long, **options) for model in models)),
        "int8": torch.equal(*(model.generate(ids, **options) for model in int8_models)),
        "on a cache": float((logits[0] - logits[1]).abs().max()) < 5e-5,
    }


def on_disk_in_int8(folder: Path) -> Any:
    return on_disk("llama", folder, 2, kv_dtype=torch.int8, micro_batches=DIVIDED_ANEW)


def rows_of_steps(folder: Path) -> dict[str, list[int]]:
    """Number of rows in each step after the prompts on this rank, with everything in memory and with the disk."""
    ids, arguments = texts(whole("llama"))
    rows: dict[str, list[int]] = {}
    for store, engine in (("memory", piped("llama", 2, micro_batches=2)), ("disk", on_disk("llama", folder, 2))):
        inner, step_rows = engine.module.runner.inner, rows.setdefault(store, [])

        def begin(step: StepInput, inner: Any = inner, step_rows: list[int] = step_rows) -> Any:
            step_rows.extend([step.shape[0]] * step.follows)
            return type(inner)._begin(inner, step)

        with mock.patch.object(inner, "_begin", begin):
            engine.generate(ids, **arguments)
    return rows


def slot_bytes(folder: Path) -> set[int]:
    """Bytes of all slots in a call, with one micro-batch, two, four and eight."""
    ids, totals = texts(whole("llama"))[0], set()
    for options in ({"schedule": "naive"}, {}, {"micro_batches": 4}, {"micro_batches": ROWS}):
        engine = on_disk("llama", folder, 2, **options)
        sizes: list[int] = []

        def counted(*arguments: Any, sizes: list[int] = sizes) -> CacheStream:
            stream = CacheStream(*arguments)
            sizes.append(stream.all_slots.numel())
            return stream

        with mock.patch("labkit.engine.memory.heads_on_disk.CacheStream", counted):
            engine.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        totals.add(sum(sizes))
    return totals


def full_from(call: int) -> Any:
    """Context in which the disk is full from file number `call` on, counted from 0."""
    reserve, calls = os.posix_fallocate, itertools.count()

    def reserve_or_fail(*arguments: Any) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*arguments)

    return mock.patch("os.posix_fallocate", reserve_or_fail)


def faults(folder: Path, faulty: int = 1, tp_size: int = 1) -> dict[str, Any]:
    """Messages when the disk of rank `faulty` is full or breaks, and whether all ranks work afterwards."""
    single_process = whole("llama")
    (ids, arguments), is_faulty = texts(single_process), dist.get_rank() == faulty
    expected = single_process.generate(ids, **arguments)
    results: dict[str, Any] = {}
    for fault, call, count in (("no room", 1, "auto"), ("no room to join", 3, DIVIDED_ANEW), ("leaving", 2, "auto")):
        engine = on_disk("llama", folder, 2, tp_size, micro_batches=count)
        with full_from(call) if is_faulty else nullcontext():
            results[fault] = said(lambda engine=engine: engine.generate(ids, **arguments))
        tokens = engine.generate(ids, **arguments)
        results[f"{fault}, after"] = torch.equal(tokens, expected), len(descriptors(folder))
    cache, step = engine(ids).past_key_values, ids[:, :1]
    with able_only_to(WRITE, folder) if is_faulty else nullcontext():
        dist.barrier()
        messages = [said(lambda: engine(step, past_key_values=cache)) for _ in range(2)]  # one uses prefetched data
        results["broken"] = messages[-1]
        dist.barrier()
    text = torch.cat((ids, step.expand(-1, 1 + cache.length - ids.shape[1])), dim=1)
    logits = engine(step, past_key_values=cache).logits[:, -1] - single_process(text).logits[:, -1]
    results["broken, after"] = float(logits.abs().max()) < 5e-5
    return results


def two_stages(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    path = Path(folder).resolve()
    return {
        "different": [
            *equal_tokens(("llama", "bloom"), path, 2),
            *equal_tokens(("gpt2", "mistral"), path, 2, micro_batches=DIVIDED_ANEW),
        ],
        "other calls": other_calls(path),
        "rows": rows_of_steps(path),
        "slots": slot_bytes(path),
        "faults": faults(path),
        "left": (list(path.iterdir()), descriptors(path)),
    }


def every_schedule(folder: str, pp_size: int) -> list[str]:
    torch.set_num_threads(1)
    return of_schedules(Path(folder).resolve(), pp_size, 1, ("auto", 4, ROWS))


def two_by_two(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    path = Path(folder).resolve()
    return {"different": of_schedules(path, 2, 2, ("auto",)), "faults": faults(path, 1, 2)}


def peaks(folder: str) -> dict[str, int]:
    """Peak growth in bytes of this rank's memory in a call, by micro-batches on the disk, and with all in memory."""
    torch.set_num_threads(1)
    model: dict[str, Any] = {"num_hidden_layers": 16, "num_key_value_heads": 6, "max_position_embeddings": 1024}
    options: dict[str, Any] = {"kv_offload": {"path": folder, "slots": 2}, "model": model}
    engines = {
        "memory": piped("llama", 2, model=model, micro_batches=8),
        "8": piped("llama", 2, micro_batches=8, **options),
        "1": piped("llama", 2, schedule="naive", **options),
    }
    growth, ids = {}, torch.randint(1, 131, (16, 900), generator=torch.Generator().manual_seed(2))
    for name, engine in engines.items():
        engine.generate(ids[:, :40], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return_freed_memory()
        reset_peak_memory()
        start = read_memory().peak
        engine.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        growth[name] = read_memory().peak - start
    return growth
