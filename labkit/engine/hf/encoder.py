"""Encoders: transformers' embeddings, pooler and heads, with layers that run on labkit's kernels.

Letters: B sequences, T tokens of each, N = B * T rows, H hidden, L layers.
"""

import copy
from collections.abc import Callable
from functools import partial
from threading import Lock
from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from labkit.engine.hf.packed import PackedModule
from labkit.engine.runners.layer import FusedLayer, Wiring
from labkit.engine.runners.stage_clock import StageClock, StageTime
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.engine.team_size import team_size
from labkit.kernels import DecodeStep, ModelWeights
from labkit.kernels.abi import CCache
from labkit.kernels.decode_step import ChunkArgs
from labkit.kernels.plain import normalise
from labkit.kernels.types import LayerCache, Rows, float_dtype, padded_head_dim
from labkit.stages import Phase, Stage, listening, stage
from labkit.system.errors import UserError
from labkit.weights.spec import WeightSpec

Pass = Callable[[Tensor, Rows, LayerCache], Tensor]  # rows of some sequences through all layers


class FusedEncoder(PackedModule, nn.Module):
    """All layers of an encoder, with the interface of transformers' module for them.

    It sums in float32, and its output has the type of its input. Not for training.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        spec: WeightSpec,
        weights: ModelWeights,
        device: torch.device,
        vanilla_layer: type[nn.Module],
    ) -> None:
        """vanilla_layer: class of transformers' layers, which hooks for hidden states look for."""
        super().__init__()
        self.config, self.model_config, self.weights = hf_config, spec.config, weights
        self.clock = LayersClock(spec.config.num_layers, weights.stages(1))
        self.step_times_ms: list[float] | None = None  # every pass appends its time if this is a list
        wiring = Wiring(weights.heads, weights.parallel_residual, weights.residual_from_norm)
        self.layer = nn.ModuleList(FusedLayer(index, w, wiring, spec.impl) for index, w in enumerate(weights.layers))
        tap = tap_class(vanilla_layer)
        self.taps = nn.ModuleList(tap() for _ in weights.layers)
        self.dtype, self.device = weights.cache_dtype, device
        self._step = DecodeStep(weights) if spec.impl == "cpp" else None
        self._one_at_a_time = Lock()  # threads may share an engine: a pass owns the workspace

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: object = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: object = None,
        is_causal: bool | None = None,
        **unused: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states [B, T, H], embedded tokens -> last_hidden_state [B, T, H].

        attention_mask: as transformers makes it for scaled_dot_product_attention.

        Large batches are computed in groups of whole sequences: at most CHUNK_ROWS rows, but at least one sequence.
        """
        start = perf_counter()
        if output_attentions if output_attentions is not None else self.config.output_attentions:
            raise UserError("fused attention keeps no attention weights; use the vanilla model for output_attentions")
        if encoder_hidden_states is not None or past_key_values is not None or is_causal:
            raise UserError(
                "encoder_hidden_states, past_key_values and is_causal are for decoders, the fused layers are an "
                "encoder's; leave them out, or use the vanilla model"
            )
        batch, tokens = hidden_states.shape[:2]
        keys_BT = seen_keys(attention_mask, batch, tokens)
        inputs_BTH = hidden_states.to(self.device, torch.float32).contiguous()
        tapped = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        group = batch if tapped else max(1, CHUNK_ROWS // tokens)
        outputs: list[Tensor] = []
        run: Pass = self._by_stages if listening() or self._step is None else partial(self._at_once, self._step)
        if tapped:
            run = partial(self._by_stages, tapped_in=hidden_states.dtype)
        with self._one_at_a_time:
            for begin in range(0, batch, group):
                some_BTH = inputs_BTH[begin : begin + group]
                keys = None if keys_BT is None else keys_BT[begin : begin + group]
                rows = encoder_rows(keys, len(some_BTH), tokens, self.device)
                outputs.append(run(some_BTH, rows, shared_slots(self.weights, rows, self.device)))
        if self.step_times_ms is not None:
            self.step_times_ms.append((perf_counter() - start) * 1e3)
        last_BTH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=last_BTH.to(hidden_states.dtype))

    def _at_once(self, step: DecodeStep, inputs_BTH: Tensor, rows: Rows, slots: LayerCache) -> Tensor:
        """Runs all layers in one C++ call, which measures the time of every stage."""
        outputs_BTH, width, count = torch.empty_like(inputs_BTH), inputs_BTH.shape[2], len(self.layer)
        inputs, outputs = inputs_BTH.view(-1, width), outputs_BTH.view(-1, width)
        caches = (CCache * count)(*[slots.c] * count)
        step.run([ChunkArgs(rows, 0, inputs=inputs, outputs=outputs)], None, caches, threads=team_size())
        self.clock.add(Phase.PREFILL, step.times, step.experts_read, head=False)
        return outputs_BTH

    def _by_stages(
        self, inputs_BTH: Tensor, rows: Rows, slots: LayerCache, tapped_in: torch.dtype | None = None
    ) -> Tensor:
        """Runs one op at a time under the stage ranges: for profilers, hidden states and the other impls.

        tapped_in: type of the hidden states that hooks collect; None: no hook collects them.
        """
        threads, seen_BTH = team_size(), inputs_BTH.to(tapped_in)
        hidden_NH = inputs_BTH.view(-1, inputs_BTH.shape[2])
        for index, (layer, tap) in enumerate(zip(self.layer, self.taps, strict=True)):
            hidden_NH = layer(hidden_NH, rows, None, slots, Phase.PREFILL, threads)
            if tapped_in is not None:
                before, seen_BTH = seen_BTH, self._after(index, hidden_NH).view_as(inputs_BTH).to(tapped_in)
                tap(before, seen_BTH)
        last = len(self.layer) - 1
        with stage(Phase.PREFILL, Stage.RESIDUAL, last):
            return self._after(last, hidden_NH).view_as(inputs_BTH)

    def _after(self, index: int, hidden_NH: Tensor) -> Tensor:
        """Returns the output of layer `index`: applies its second norm, which kernels otherwise run with the next
        layer.
        """
        following = self.weights.layers[index + 1 :]
        return normalise(following[0].qkv.norm if following else self.weights.final_norm, hidden_NH)


class LayersClock(StageClock):
    """Clock of the layers alone: transformers computes the embedding and the heads."""

    def times(self) -> list[StageTime]:
        return [time for time in super().times() if time.layer is not None]


def shared_slots(weights: ModelWeights, rows: Rows, device: torch.device) -> LayerCache:
    """Returns memory for keys and values [B, Hkv, T, padded D] of a pass. None are kept, so all layers share it."""
    shape = (rows.batch, weights.heads.kv, rows.tokens, padded_head_dim(weights.heads.dim))
    keys, values = (torch.empty(shape, dtype=weights.cache_dtype, device=device) for _ in range(2))
    return LayerCache(keys, values, 0)


class Tap(nn.Module):
    """Module for transformers' hooks that collect hidden states."""

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        return after


def tap_class(vanilla_layer: type[nn.Module]) -> type[nn.Module]:
    """Returns a tap class that is a subclass of `vanilla_layer`, as the hooks need, but without its weights."""
    return type(f"{vanilla_layer.__name__}Tap", (Tap, vanilla_layer), {"__init__": nn.Module.__init__})


def seen_keys(mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """Returns the visible tokens of each sequence, bool [B, T], for a mask bool [B, 1, T, T]; None: all are visible.

    Raises ValueError for a mask of another kind, or if tokens of one sequence see different tokens.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != tokens:
        raise UserError(
            f"attention_mask: expected [{batch}, {tokens}], 0 for padding, got a mask that transformers turns into "
            f"{mask.dtype} {list(mask.shape)}"
        )
    keys_BT = mask[:, 0, 0]
    if mask.stride(2) != 0 and not torch.equal(mask, keys_BT[:, None, None].expand_as(mask)):
        raise UserError(
            f"attention_mask: tokens of one sequence see different ones; pass [{batch}, {tokens}], or use the vanilla "
            "model"
        )
    return keys_BT.expand(batch, tokens)


def encoder_rows(keys_BT: Tensor | None, batch: int, tokens: int, device: torch.device) -> Rows:
    """Returns rows of whole sequences with the visible tokens `keys_BT`. Positions are 0: the embedding has them."""
    positions = torch.zeros(batch * tokens, dtype=torch.int32, device=device)
    if keys_BT is None:
        return Rows(batch, tokens, positions, torch.zeros(batch, dtype=torch.int32, device=device))
    keys_BT = keys_BT.to(device, torch.uint8).contiguous()
    first = torch.where(keys_BT.bool().any(1), keys_BT.argmax(1), tokens).to(torch.int32)
    holes = int((keys_BT == 0).sum()) != int(first.sum())
    return Rows(batch, tokens, positions, first, keys_BT if holes else None)


def fused_encoder_model(
    model: PreTrainedModel, spec: WeightSpec, weights: ModelWeights, device: torch.device, *, consume: bool
) -> PreTrainedModel:
    """Returns a copy of `model`, or `model` itself if `consume`, with a FusedEncoder instead of its layers. Everything
    else is cast to the type of the layers' matrices, or to bfloat16 if they are int8.
    """
    name, stack = spec.policy.layers.split(".")
    vanilla = getattr(model.base_model, name)
    vanilla_layer = type(getattr(vanilla, stack)[0])
    module = model if consume else copy.deepcopy(model, {id(vanilla): nn.Identity()})
    module.config._attn_implementation = "sdpa"  # its masks are small, and None if nothing is hidden
    setattr(module.base_model, name, FusedEncoder(module.config, spec, weights, device, vanilla_layer))
    for part in module.modules():  # the original's hooks are on its own layers
        part.__dict__.pop("_output_capturing_hooks_installed", None)
    return module.to(device=device, dtype=float_dtype(spec.dtype)).requires_grad_(False).eval()
