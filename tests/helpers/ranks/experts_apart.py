"""Models whose experts are on different ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.gguf_files import gguf_model, write_gguf
from helpers.models.small_models import ALL_EXPERTS, small_model
from helpers.ranks.cut_models import Found, compare, engine, four_ranks, message, prompts

import labkit


def with_experts_apart(size: int, ep_size: int, folder: str) -> dict[str, Any]:
    """Models whose experts are on different ranks, from a model in memory, a folder and a GGUF file, and what the ranks
    say of options that do not fit.
    """
    found, mixtral = {}, small_model("mixtral")
    for name in ("mixtral", "qwen2-moe", "qwen3-moe", "granite-moe", "gpt-oss"):
        heads: dict[str, Any] = {} if name == "mixtral" or size < 4 else {"num_attention_heads": 6}
        found[name] = compare(engine(name, 1, **heads), engine(name, size, ep_size=ep_size, **heads))
    for name, all_experts in ALL_EXPERTS.items():
        if name in ("mixtral", "qwen2-moe", "gpt-oss") or (size > 2 and name != "olmoe"):
            whole, cut = (engine(name, ranks, dtype=torch.int8, ep_size=parts, **all_experts)
                          for ranks, parts in ((1, 1), (size, ep_size)))  # fmt: skip
            found[f"{name} in int8"] = compare(whole, cut)
    options: dict[str, Any] = {"tensor_parallel": {"tp_size": size}, "moe": {"ep_size": ep_size}}
    if dist.get_rank() == 0:
        mixtral.save_pretrained(f"{folder}/mixtral")
        write_gguf(Path(folder, "mixtral.gguf"), gguf_model("mixtral"))
    dist.barrier()
    for source in (f"{folder}/mixtral", f"{folder}/mixtral.gguf"):
        whole, cut = (labkit.init_inference(source, dtype=torch.float32, **given) for given in ({}, options))
        found[f"file {Path(source).name}"] = compare(whole, cut)
    in_stages: bool | None = None
    if size == 2:
        found |= from_saved(folder, options)
    else:
        in_stages = stages_with_experts()
        cut = labkit.init_inference(f"{folder}/mixtral.gguf", dtype=torch.float32, **options)
    held = cut.weights.layers[0].mlp.own
    cut.stage_times()
    with cut.noting_experts() as chosen:
        cut(prompts()[0])
    chose = [len(set(layer.flatten().tolist()) & set(held)) for layer in chosen[0]]
    refused = [
        message(partial(labkit.init_inference, small_model(name), **options | given))
        for name, given in (
            ("mixtral", {"moe": {"ep_size": size + 1}}),
            ("llama", {}),
            ("mixtral", {"moe": {"ep_size": ep_size, "moe_experts": [7]}}),
            ("mixtral", {"save_mp_checkpoint_path": f"{folder}/not"}),
        )
    ]
    return {
        "found": found,
        "held": (held.start, held.stop),
        "chose": chose,
        "read": list(cut.experts_read()[0].by_layer),
        "refused": refused,
        "in stages": in_stages,
    }


def stages_with_experts() -> bool:
    """Whether a model in two stages, each of two ranks with other experts, gives the tokens of one process."""
    ids = prompts()[0]
    options: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}, "pipeline_parallel": {"pp_size": 2}, "ep_size": 2}
    either: tuple[dict[str, Any], ...] = ({}, options)
    tokens = [
        labkit.init_inference(small_model("mixtral"), dtype=torch.float32, **given).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        for given in either
    ]
    return torch.equal(*tokens)


def from_saved(folder: str, options: dict[str, Any]) -> dict[str, Found]:
    """Models from checkpoints that labkit saved with one process, in floats and in codes."""
    found = {}
    for name, kinds in (("mixtral", {}), ("gpt-oss", {"dtype": torch.int8})):
        given: dict[str, Any] = {"dtype": torch.float32} | kinds
        saved = f"{folder}/saved-{name}"
        if dist.get_rank() == 0:
            labkit.init_inference(small_model(name, **ALL_EXPERTS[name]), **given, save_mp_checkpoint_path=saved)
        dist.barrier()
        found[f"saved {name} {'in int8' if kinds else ''}"] = compare(
            labkit.init_inference(saved, **given), labkit.init_inference(saved, **given, **options)
        )
    return found


def four_ranks_with_experts(folder: str) -> dict[str, Any]:
    return four_ranks() | {"experts": with_experts_apart(4, 2, folder)}
