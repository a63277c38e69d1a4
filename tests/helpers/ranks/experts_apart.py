"""Models whose experts are on different ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.gguf_files import gguf_model, write_gguf
from helpers.models.small_models import ALL_EXPERTS, small_model
from helpers.ranks.cut_models import Found, compare, engine, four_ranks, message, prompts
from helpers.ranks.experts_offloaded import experts_offloaded

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
    saved, same = from_saved(folder, options)
    found |= saved
    if size == 4:
        in_stages = stages_with_experts(f"{folder}/apart-mixtral")
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
        )
    ]
    return {
        "found": found,
        "held": (held.start, held.stop),
        "chose": chose,
        "read": list(cut.experts_read()[0].by_layer),
        "refused": refused,
        "in stages": in_stages,
        "same when saved": same,
        "offloaded": experts_offloaded(options, folder),
    }


def stages_with_experts(saved: str) -> bool:
    """Whether two stages, each of two ranks with other experts, give the tokens of one process. All load a checkpoint
    that four ranks saved.
    """
    ids = prompts()[0]
    options: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}, "pipeline_parallel": {"pp_size": 2}, "ep_size": 2}
    either: tuple[dict[str, Any], ...] = ({}, options)
    tokens = [
        labkit.init_inference(saved, dtype=torch.float32, **given).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        for given in either
    ]
    return torch.equal(*tokens)


def from_saved(folder: str, options: dict[str, Any]) -> tuple[dict[str, Found], list[bool]]:
    """Models from checkpoints that labkit saved, in floats and in codes: with one process, and with the ranks of
    `options`. Also whether ranks that load their own save give the same logits.
    """
    found, same = {}, []
    for name, kinds in (("mixtral", {}), ("gpt-oss", {"dtype": torch.int8})):
        given: dict[str, Any] = {"dtype": torch.float32} | kinds
        heads: dict[str, Any] = {} if name == "mixtral" else {"num_attention_heads": 6}
        model = small_model(name, **ALL_EXPERTS[name], **heads)
        one, apart = f"{folder}/saved-{name}", f"{folder}/apart-{name}"
        if dist.get_rank() == 0:
            labkit.init_inference(model, **given, save_mp_checkpoint_path=one)
        dist.barrier()
        saving = labkit.init_inference(model, **given, **options, save_mp_checkpoint_path=apart)
        for saved in (one, apart):
            whole, cut = (labkit.init_inference(saved, **given, **more) for more in ({}, options))
            found[f"{Path(saved).name} {'in int8' if kinds else ''}"] = compare(whole, cut)
            same.append(torch.equal(saving(prompts()[0]).logits, cut(prompts()[0]).logits))
    return found, same


def four_ranks_with_experts(folder: str) -> dict[str, Any]:
    return four_ranks() | {"experts": with_experts_apart(4, 2, folder)}
