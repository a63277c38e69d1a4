"""Names of tensors: what libraries add to them, and what to say about names that do not fit a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

# Parts of names that libraries add to a model's tensors, and the cause and remedy for the error message.
WRAPPED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.", ".base_layer.", ".base_model."),
        "an adapter of peft is not merged into them: call merge_and_unload() on the peft model, or unload() to leave "
        "the adapter out",
    ),
    (
        (".weight_g.", ".weight_v.", ".parametrizations."),
        "a parametrization such as weight norm is not folded into them: call "
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight'), or remove_weight_norm(module), first",
    ),
    (
        (".weight_orig.", ".weight_mask."),
        "pruning is not folded into them: call torch.nn.utils.prune.remove(module, 'weight') on the pruned modules "
        "first",
    ),
    (
        (".qweight.", ".qzeros.", ".SCB.", ".absmax.", ".quant_state.", ".weight_scale.", ".weight_packed."),
        "these are quantised weights of another library: take the checkpoint in floating point, and quantise it with "
        "dtype=torch.int8",
    ),
)


def remedy(missing: set[str], extra: set[str], *, architecture: str, layers: str, head: str) -> str:
    """The advice of the error message about names that do not fit; it depends on how they differ.

    layers, head: the names of these modules.
    """
    for marks, cause in WRAPPED:
        if any(mark in f".{name}." for mark in marks for name in extra):
            return cause
    if missing == {f"{head}.weight"}:
        return (
            f"these are the weights of a decoder without its head: take the whole {architecture}, or set "
            "tie_word_embeddings to true where the head is the embedding"
        )
    if _is_decoder_alone(missing, extra, layers, head):
        return f"this is a decoder without its head: pass the whole model, a {architecture}"
    return "check that the weights and the config belong together"


def _is_decoder_alone(missing: set[str], extra: set[str], layers: str, head: str) -> bool:
    """Whether all decoder weights are present, under names that lack the decoder's path in the model."""
    parents = layers.split(".")[:-1]
    paths = (".".join(parents[: depth + 1]) for depth in range(len(parents)))
    in_decoder = {name for name in missing if not name.startswith(f"{head}.")}
    return any({f"{path}.{name}" for name in extra} == in_decoder for path in paths)


def unwrapped(name: str) -> str:
    """The name of a tensor without the wrappers of torch.compile."""
    return name.replace("_orig_mod.", "")


def is_buffer(name: str) -> bool:
    """Whether a tensor is a mask or frequencies, which older checkpoints store with the weights."""
    return name.endswith((".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq"))


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that checkpoints store as weights, such as the bias of a choice of experts."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored and buffer.is_floating_point()}


def misfits(missing: Iterable[str], extra: Iterable[str]) -> str:
    """The tensors that a file lacks, and those beyond the model's, with their numbers."""
    kinds = {"missing": set(missing), "extra": set(extra)}
    return "; ".join(f"{len(names)} {kind}: {some_of(names)}" for kind, names in kinds.items() if names)


def some_of(names: Iterable[str], most: int = 8) -> str:
    """The first `most` names in alphabetical order, and how many more there are."""
    names = set(names)
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f", … ({len(names) - most} more)" if len(names) > most else "")
