"""What each rank does with models in which some layers have an MLP and the others experts."""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.any_models import padded_tokens, texts
from helpers.models.dense_among_experts import DENSE, dense_model
from helpers.models.engines import distance

import labkit

WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"tp_size": 2}},
    "experts": {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2}},
    "pipeline": {"pipeline_parallel": {"pp_size": 2}},
    "a stage of MLPs": {"pipeline_parallel": {"pp_size": 2, "layers": [1, 3]}},
}


def dense_on_two_ranks(folder: str) -> dict[str, bool]:
    """Whether each model gives the tokens of transformers, by how it is divided; and for weights that one process
    or two have saved, whether as many or the other number give the logits of one process.
    """
    torch.set_num_threads(1)
    right = {}
    for name in DENSE:
        model = dense_model(name)
        expected = texts(model)
        for way, options in WAYS.items():
            engine = labkit.init_inference(model, dtype=torch.float32, **options)
            right[f"{name} {way}"] = engine.level == "derived row" and torch.equal(texts(engine), expected)
            engine.destroy()
        for dtype in (torch.float32, torch.int8):
            right |= _saved(name, dtype, f"{folder}/{name} {dtype}")
    return right


def _saved(name: str, dtype: torch.dtype, folder: str) -> dict[str, bool]:
    model, two, right = dense_model(name), WAYS["tensor"], {}
    if dist.get_rank() == 0:
        labkit.init_inference(model, dtype=dtype, save_mp_checkpoint_path=f"{folder} one")
    dist.barrier()
    labkit.init_inference(model, dtype=dtype, save_mp_checkpoint_path=f"{folder} two", **two).destroy()
    (ids, mask), near = padded_tokens(), 1e-5 if dtype == torch.float32 else 0.05
    expected = labkit.init_inference(f"{folder} one", dtype=dtype)(ids, attention_mask=mask).logits[mask.bool()]
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "one for two": ("one", two), "two for one": ("two", {}), "two for two": ("two", two),
        "one for experts": ("one", WAYS["experts"]),
    }  # fmt: skip
    for way, (saved, options) in ways.items():
        engine = labkit.init_inference(f"{folder} {saved}", dtype=dtype, **options)
        logits = engine(ids, attention_mask=mask).logits[mask.bool()]
        rows = map(distance, logits, expected)  # rounding may choose another expert for one of them
        right[f"{name} {dtype} {way}"] = median(rows) < near
        engine.destroy()
    return right
