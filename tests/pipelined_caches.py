"""What each rank of a pipeline does with keys and values on the disk, called through `labkit.launch`."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from offloaded import WRITE, able_only_to, descriptors
from pipelined_models import SCHEDULES, piped, said, whole
from small_models import small_model
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


def texts(alone: InferenceEngine) -> tuple[Tensor, dict[str, Any]]:
    """Prompts of unequal lengths, one with a hole, whose texts end at different steps, some with their first token."""
    ids = torch.randint(1, alone.model_config.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[5, :2], mask[6, 3] = 0, 0, 0
    arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW}
    text = alone.generate(ids, **arguments)[:, 9:]
    ends = {int(text[row, step]) for row, step in ((0, 0), (2, 2), (3, 3), (4, 8), (7, 5))}
    return ids, arguments | {"eos_token_id": list(ends)}


def equal_tokens(names: tuple[str, ...], folder: Path, pp_size: int, tp_size: int = 1, **options: Any) -> list[str]:
    """The models whose tokens are not those of one process with all in memory."""
    different = []
    for name in names:
        alone = whole(name)
        ids, arguments = texts(alone)
        engine = on_disk(name, folder, pp_size, tp_size, **options)
        if not torch.equal(engine.generate(ids, **arguments), alone.generate(ids, **arguments)):
            different.append(f"{name}, {options}")
    return different


def of_schedules(folder: Path, pp_size: int, tp_size: int, counts: tuple[Any, ...]) -> list[str]:
    """The schedules and micro-batches whose tokens are not those of one process."""
    different = equal_tokens(("llama",), folder, pp_size, tp_size, schedule="naive")
    for schedule in SCHEDULES[:3]:
        for count in (*counts, DIVIDED_ANEW, {"prompt": 4, "decode": 1}) if schedule == "queue" else counts:
            different += equal_tokens(("llama",), folder, pp_size, tp_size, schedule=schedule, micro_batches=count)
    return different


def other_calls(folder: Path) -> dict[str, bool]:
    """Beams, a prompt of more rows than a piece has, an int8 cache, and `forward` on a cache that was returned."""
    alone, engine = whole("llama"), on_disk("llama", folder, 2)
    ids, _ = texts(alone)
    more: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    long = torch.randint(1, 131, (7, 150), generator=torch.Generator().manual_seed(2))
    small = [labkit.init_inference(small_model("llama"), kv_dtype=torch.int8), on_disk_in_int8(folder)]
    both = (alone, engine)
    logits = [each(ids[:, 8:], past_key_values=each(ids[:, :8]).past_key_values).logits for each in both]
    return {
        "beams": torch.equal(*(each.generate(ids[:2], num_beams=3, **more) for each in both)),
        "long": torch.equal(*(each.generate(long, **more) for each in both)),
        "int8": torch.equal(*(each.generate(ids, **more) for each in small)),
        "on a cache": float((logits[0] - logits[1]).abs().max()) < 5e-5,
    }


def on_disk_in_int8(folder: Path) -> Any:
    return on_disk("llama", folder, 2, kv_dtype=torch.int8, micro_batches=DIVIDED_ANEW)


def rows_of_steps(folder: Path) -> dict[str, list[int]]:
    """How many rows each step behind the prompts had here, with all in memory and on the disk."""
    ids, arguments = texts(whole("llama"))
    found: dict[str, list[int]] = {}
    for where, engine in (("memory", piped("llama", 2, micro_batches=2)), ("disk", on_disk("llama", folder, 2))):
        inner, seen = engine.module.runner.inner, found.setdefault(where, [])

        def begin(step: StepInput, inner: Any = inner, seen: list[int] = seen) -> Any:
            seen.extend([step.shape[0]] * step.follows)
            return type(inner).begin(inner, step)

        with mock.patch.object(inner, "begin", begin):
            engine.generate(ids, **arguments)
    return found


def slot_bytes(folder: Path) -> set[int]:
    """Of all slots that a call has, with one micro-batch, two, four and eight."""
    ids, found = texts(whole("llama"))[0], set()
    for options in ({"schedule": "naive"}, {}, {"micro_batches": 4}, {"micro_batches": ROWS}):
        engine = on_disk("llama", folder, 2, **options)
        sizes: list[int] = []

        def made(*given: Any, sizes: list[int] = sizes) -> CacheStream:
            stream = CacheStream(*given)
            sizes.append(stream.all_slots.numel())
            return stream

        with mock.patch("labkit.engine.memory.heads_on_disk.CacheStream", made):
            engine.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        found.add(sum(sizes))
    return found


def full_from(call: int) -> Any:
    """Within, the disk has no room for a file from this one on, counted from 0."""
    reserve, calls = os.posix_fallocate, iter(range(1 << 30))

    def reserved(*given: Any) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*given)

    return mock.patch("os.posix_fallocate", reserved)


def faults(folder: Path, faulty: int = 1, tp_size: int = 1) -> dict[str, Any]:
    """What is said where the disk of rank `faulty` has no room or breaks; all go on together afterwards."""
    alone = whole("llama")
    (ids, arguments), here = texts(alone), dist.get_rank() == faulty
    wanted = alone.generate(ids, **arguments)
    found: dict[str, Any] = {}
    for what, call, count in (("no room", 1, "auto"), ("no room to join", 3, DIVIDED_ANEW), ("leaving", 2, "auto")):
        engine = on_disk("llama", folder, 2, tp_size, micro_batches=count)
        with full_from(call) if here else nullcontext():
            found[what] = said(lambda engine=engine: engine.generate(ids, **arguments))
        tokens = engine.generate(ids, **arguments)
        found[f"{what}, after"] = torch.equal(tokens, wanted), len(descriptors(folder))
    cache, step = engine(ids).past_key_values, ids[:, :1]
    with able_only_to(WRITE, folder) if here else nullcontext():
        dist.barrier()
        messages = [said(lambda: engine(step, past_key_values=cache)) for _ in range(2)]  # one finds all read ahead
        found["broken"] = messages[-1]
        dist.barrier()
    text = torch.cat((ids, step.expand(-1, 1 + cache.length - ids.shape[1])), dim=1)
    logits = engine(step, past_key_values=cache).logits[:, -1] - alone(text).logits[:, -1]
    found["broken, after"] = float(logits.abs().max()) < 5e-5
    return found


def two_stages(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    where = Path(folder).resolve()
    return {
        "different": [
            *equal_tokens(("llama", "bloom"), where, 2),
            *equal_tokens(("gpt2", "mistral"), where, 2, micro_batches=DIVIDED_ANEW),
        ],
        "other calls": other_calls(where),
        "rows": rows_of_steps(where),
        "slots": slot_bytes(where),
        "faults": faults(where),
        "left": (list(where.iterdir()), descriptors(where)),
    }


def every_schedule(folder: str, pp_size: int) -> list[str]:
    torch.set_num_threads(1)
    return of_schedules(Path(folder).resolve(), pp_size, 1, ("auto", 4, ROWS))


def two_by_two(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    where = Path(folder).resolve()
    return {"different": of_schedules(where, 2, 2, ("auto",)), "faults": faults(where, 1, 2)}


def peaks(folder: str) -> dict[str, int]:
    """Bytes by which this rank's memory grows at most, in a call with as many micro-batches, and with all in memory."""
    torch.set_num_threads(1)
    model: dict[str, Any] = {"num_hidden_layers": 16, "num_key_value_heads": 6, "max_position_embeddings": 1024}
    options: dict[str, Any] = {"kv_offload": {"path": folder, "slots": 2}, "model": model}
    engines = {
        "memory": piped("llama", 2, model=model, micro_batches=8),
        "8": piped("llama", 2, micro_batches=8, **options),
        "1": piped("llama", 2, schedule="naive", **options),
    }
    found, ids = {}, torch.randint(1, 131, (16, 900), generator=torch.Generator().manual_seed(2))
    for name, engine in engines.items():
        engine.generate(ids[:, :40], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return_freed_memory()
        reset_peak_memory()
        before = read_memory().peak
        engine.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        found[name] = read_memory().peak - before
    return found
