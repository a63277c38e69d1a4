"""Models whose ranks have different experts, and read them, or their share of layers, from files of their own."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.offloaded import flip_byte
from helpers.models.small_models import ALL_EXPERTS, small_model
from helpers.ranks.cut_models import (
    Found,
    compare,
    engine_with_experts_on_disk,
    fetched_layers,
    greedy,
    message,
    prompts,
    streamed_engine,
)

import labkit

WIDE: dict[str, Any] = {"intermediate_size": 640}  # experts are many pages long


@dataclass(frozen=True)
class ReadExperts:
    """What a rank's store says of a generation, and what its steps say."""

    slots: int
    stored: int  # experts in the rank's file
    wanted: int
    by_steps: float  # experts that steps ran
    hits: int
    reads: int
    bytes_read: int
    bytes_per_expert: int


@dataclass(frozen=True)
class Offloaded:
    """A comparison with one process, and with the same ranks with all weights in memory."""

    found: Found
    same: bool  # logits as with all weights in memory
    read: ReadExperts | None = None  # None: layers are offloaded


def experts_offloaded(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """By model and by what is offloaded. Then the experts of rank 1 are damaged during use, and repaired."""
    offloaded, folder = {}, f"{folder}/offloaded"
    for name, dtype in (("gpt-oss", torch.int8), ("mixtral", torch.float32)):
        model = small_model(name, **WIDE, num_attention_heads=6, **(ALL_EXPERTS[name] if dtype == torch.int8 else {}))
        given: dict[str, Any] = {"dtype": dtype} | options
        whole, resident = labkit.init_inference(model, dtype=dtype), labkit.init_inference(model, **given)
        layers = streamed_engine(model, {"path": folder, "experts": False}, **given)
        offloaded[f"{name}, layers"] = Offloaded(compare(whole, layers), same_logits(resident, layers))
        by_need = engine_with_experts_on_disk(model, folder, **given)
        compared, same = compare(whole, by_need), same_logits(resident, by_need)
        offloaded[f"{name}, experts"] = Offloaded(compared, same, read_by(by_need))
    return {"offloaded": offloaded, "damaged": damaged_experts(by_need)}


def same_logits(resident: Any, cut: Any) -> bool:
    ids, mask = prompts()
    return torch.equal(*(side(ids, attention_mask=mask).logits for side in (resident, cut)))


def read_by(cut: Any) -> ReadExperts:
    """The experts that a generation reads."""
    store, before = cut.expert_store, cut.expert_store.counts
    cut.stage_times()  # begins to count anew
    greedy(cut, *prompts())
    counts = store.counts.since(before)
    return ReadExperts(
        slots=store.slots,
        stored=store.layers * store.per_layer,
        wanted=counts.wanted,
        by_steps=sum(part.calls * sum(part.by_layer) for part in cut.experts_read()),
        hits=counts.hits,
        reads=counts.reads,
        bytes_read=counts.bytes_read,
        bytes_per_expert=store.bytes_per_expert,
    )


def damaged_experts(cut: Any) -> tuple[str, str]:
    """The messages on this rank while all experts of rank 1 are altered, and after they are whole again."""
    store, (ids, mask) = cut.expert_store, prompts()
    size = store.path.stat().st_size
    messages = []
    for _ in range(2):
        dist.barrier()
        if dist.get_rank() == 1:
            for offset in range(size // 2, size, store.bytes_per_expert // 2):
                flip_byte(store.path, offset)
        dist.barrier()
        messages.append(message(lambda: greedy(cut, ids, mask)))
    damaged, whole = messages
    return damaged, whole


def fetched_layers_and_experts(folder: str) -> dict[str, Any]:
    """The results of `fetched_layers`, and of layers with experts: by device, the largest difference from the whole
    model's logits, and the number of layers copied.
    """
    results, fetched = fetched_layers(folder), {}
    model, ids = small_model("mixtral"), torch.arange(1, 18)[None]
    with torch.no_grad():
        expected = model(ids).logits
    for offload in ({"device": "cpu"}, {"path": f"{folder}/experts"}):
        cut = streamed_engine(model, offload, impl="triton", ep_size=2)
        difference = float((cut(ids).logits - expected).abs().max())
        fetched[cut.options.offload.device] = difference, cut.streamed.stream.blocks_read
    return results | {"experts": fetched}
