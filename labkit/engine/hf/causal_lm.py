"""The fused model: Hugging Face's interface outside, labkit's kernels inside."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from labkit.engine.hf.decode_loop import decode_loop, runs_in_decode_loop
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import SlotPool
from labkit.engine.parallel.ranks import CHUNK_ROWS, Ranks
from labkit.engine.runners.layer import FusedLayer, Wiring
from labkit.engine.runners.stage_clock import StageClock
from labkit.kernels import DecodeStep, ModelWeights, gemm
from labkit.kernels.gemm import unpack_rows
from labkit.kernels.plain import argmax_or_minus_one, normalise
from labkit.kernels.types import Rotary, Rows
from labkit.models.config import ModelConfig, RotarySpec
from labkit.models.policies import Policy
from labkit.stages import Phase, Stage, listening, phase_of, stage
from labkit.system.errors import UserError, UserTypeError

if TYPE_CHECKING:
    from labkit.engine.runners.cuda_graph import GpuDecoder


class FusedCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder-only language model on fused kernels, with the attributes that `generate` and pipelines look for.

    `forward` computes in float32 sums and gives float32 logits whatever the weights are. Not for training.
    """

    main_input_name = "input_ids"
    _supports_cache_class = True

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: ModelConfig,
        policy: Policy,
        weights: ModelWeights,
        impl: str,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        hf_config = copy.deepcopy(hf_config)
        hf_config._attn_implementation = "eager"  # transformers' choice among its own kernels means nothing here
        super().__init__(hf_config)
        self.model_config, self.weights, self.impl, self.ranks = config, weights, impl, ranks
        self.local_config = ranks.shard.local if ranks else config  # of the layers that are here
        self.cache_dtype = weights.cache_dtype
        self.clock = StageClock(config.num_layers, weights.stages(ranks.shard.size if ranks else 1))
        self.step_times_ms: list[float] | None = None  # appended to by every step once somebody puts a list here
        self._device = device
        self._pool = SlotPool(self.local_config, weights.cache_dtype, device) if impl == "triton" else None
        self._step = DecodeStep(weights, ranks.exchange if ranks else None) if impl == "cpp" else None
        self.gpu: GpuDecoder | None = None
        self._rotary: Rotary | None = None
        self._staged = False  # whether the ranks agreed to go stage by stage
        self._one_at_a_time = Lock()  # threads may share an engine: a step owns the workspace and the rotary tables
        _attach(self, policy.layers, nn.ModuleList(self._make_layers()))
        self.eval()

    def _make_layers(self) -> Iterator[FusedLayer]:
        w = self.weights
        wiring = Wiring(w.heads, w.parallel_residual, w.residual_from_norm, self.ranks.sum if self.ranks else None)
        for index, layer in enumerate(w.layers):
            yield FusedLayer(index, layer, wiring, self.impl)

    @property
    def layers(self) -> list[FusedLayer]:
        return [module for module in self.modules() if isinstance(module, FusedLayer)]

    @property
    def dtype(self) -> torch.dtype:
        return self.cache_dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def _init_weights(self, module: nn.Module) -> None:
        """There is nothing to initialise: weights come packed."""

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache that reserves `capacity` slots per sequence when it is first used."""
        return KVCache(self.local_config, self.cache_dtype, capacity, self._pool)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unused: object,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """input_ids [B, T] after what `past_key_values` holds -> logits float32 [B, T or logits_to_keep, V].

        attention_mask [B, past + T] hides padding anywhere; positions count visible tokens unless `position_ids` [B, T]
        say otherwise. The returned cache is a KVCache, which grows in place on the next call. A given cache of
        transformers is filled too, as vanilla models do, at the price of a copy on every call.
        """
        if input_ids is None and unused.get("inputs_embeds") is not None:
            raise UserError("inputs_embeds: the fused model looks tokens up itself; pass input_ids")
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            got = "nothing" if input_ids is None else list(input_ids.shape)
            raise UserError(
                f"input_ids: expected token ids of shape [batch, tokens >= 1], got {got}; the prompt is empty"
            )
        if output_attentions:
            raise UserError("fused attention keeps no attention weights; use the vanilla model for output_attentions")
        cache = self.own_cache(past_key_values, attention_mask)
        keep = logits_to_keep or input_ids.shape[1]
        hidden_states: list[Tensor] | None = [] if output_hidden_states else None
        logits = self.run(input_ids, cache, attention_mask, position_ids, keep=keep, hidden_states=hidden_states)
        if past_key_values is not None and past_key_values is not cache:
            cache.hand_back(past_key_values)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.model_config.vocab_size)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache is not False else None,
            hidden_states=None if hidden_states is None else tuple(hidden_states),
        )
        return output if return_dict is not False else output.to_tuple()

    def own_cache(self, given: Cache | None, attention_mask: Tensor | None = None) -> KVCache:
        """`given` itself if it is the engine's own kind, else a new one with what it holds."""
        if isinstance(given, KVCache):
            return given
        cache = self.new_cache()
        if given is not None and given.get_seq_length() > 0:
            cache.adopt(given, attention_mask)
        return cache

    def run(
        self,
        input_ids: Tensor,
        cache: KVCache,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        keep: int,
        greedy: bool = False,
        top: int | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Runs `input_ids` [B, T] on top of `cache`: logits [B, keep, V] of the last `keep` tokens, or with `greedy`
        their argmax int64 [B, keep]. `top`: so many of the largest logits are enough, and the others may be -inf.
        Long prompts go through in chunks of CHUNK_ROWS rows.
        """
        start = perf_counter()
        batch, tokens = input_ids.shape
        past = cache.length
        self._check(input_ids, cache, attention_mask, position_ids)
        phase = phase_of(past, tokens)
        if self.ranks is not None:
            same = (input_ids, past, attention_mask, position_ids, keep, greedy, top, hidden_states is not None)
            self._staged = self.ranks.agree("the tokens", *same, flag=self._by_stages(batch, hidden_states))
        input_ids = input_ids.to(self._device, torch.int64).contiguous()
        if attention_mask is not None:
            attention_mask = attention_mask.to(self._device)
        cache.reserve(batch, past + tokens)
        chunk = tokens if hidden_states is not None else max(1, CHUNK_ROWS // batch)
        results: list[Tensor] = []
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            mask = None if attention_mask is None else attention_mask[:, : past + end]
            positions = None if position_ids is None else position_ids[:, begin:end]
            rows = cache.place(batch, end - begin, mask, positions)
            kept = max(0, min(end, tokens) - max(begin, tokens - keep))
            tokens_BT = input_ids[:, begin:end].contiguous()
            with self._one_at_a_time:
                result = self._run_rows(tokens_BT, rows, cache, phase, kept, greedy, top, hidden_states)
            if result is not None:
                results.append(result)
            cache.length = past + end
        self._note_time(start)
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def advance(self, tokens_B1: Tensor, cache: KVCache, *, greedy: bool, top: int | None = None) -> Tensor:
        """`run` for one more token per sequence, int64 [B, 1], chosen from the logits before.

        It is of the vocabulary, visible and at the next position, so that there is little to check between two steps.
        """
        start = perf_counter()
        self._check_reach(cache.reach + 1)
        result: Tensor | None
        if self.gpu is not None:
            with self._one_at_a_time:
                rotary = self._rotary_for(cache.reach + max(1, cache.capacity - cache.length))
                result = self.gpu(tokens_B1, cache, rotary, greedy=greedy)
            cache.reach += 1
        else:
            rows = cache.place(len(tokens_B1), 1)
            with self._one_at_a_time:
                result = self._run_rows(tokens_B1, rows, cache, Phase.DECODE, 1, greedy, top, None)
        cache.length += 1
        self._note_time(start)
        assert result is not None
        return result

    def _note_time(self, start: float) -> None:
        if self.step_times_ms is not None:
            self.step_times_ms.append((perf_counter() - start) * 1e3)

    def _check_reach(self, reach: int) -> None:
        limit = self.model_config.max_positions
        if limit is not None and reach > limit and self.model_config.position == "learned":
            raise UserError(
                f"{reach} tokens are more than the model's {limit} positions; shorten the prompt or the output"
            )

    def _check(
        self, input_ids: Tensor, cache: KVCache, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        batch, tokens = input_ids.shape
        past, total = cache.length, cache.length + tokens
        if attention_mask is not None and tuple(attention_mask.shape) != (batch, total):
            raise UserError(
                f"attention_mask is {list(attention_mask.shape)}; expected [{batch}, {total}], "
                f"that is {past} tokens in the cache and {tokens} new ones"
            )
        reach = cache.reach + tokens if attention_mask is None else total
        if position_ids is not None:
            if tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)) or int(position_ids.min()) < 0:
                raise UserError(
                    f"position_ids are {list(position_ids.shape)}, from {int(position_ids.min())} on; "
                    f"expected [{batch}, {tokens}] from 0 on"
                )
            reach = int(position_ids.max()) + 1
        self._check_reach(reach)
        if input_ids.is_floating_point():
            raise UserError(f"input_ids: expected integers, got {input_ids.dtype}")
        low, high = (int(value) for value in torch.aminmax(input_ids))
        vocab = self.model_config.vocab_size
        if low < 0 or high >= vocab:
            raise UserError(f"token ids run from {low} to {high}; the model's vocabulary is 0 to {vocab - 1}")

    def _run_rows(
        self,
        tokens_BT: Tensor,
        rows: Rows,
        cache: KVCache,
        phase: Phase,
        keep: int,
        greedy: bool,
        top: int | None,
        hidden_states: list[Tensor] | None,
    ) -> Tensor | None:
        rotary, threads = self._rotary_for(cache.reach), torch.get_num_threads()
        staged = self._staged if self.ranks else self._by_stages(rows.batch, hidden_states)
        if self._step is None or staged:
            return self._run_stages(tokens_BT, rows, rotary, cache, phase, keep, greedy, top, hidden_states)
        batch = rows.batch
        logits = argmax = None
        if greedy:
            argmax = torch.empty(batch, keep, dtype=torch.int64)
        else:
            logits = torch.empty(batch, keep, self.model_config.vocab_size)
        self._step(
            tokens_BT,
            rows,
            rotary,
            cache.c,
            cache.length,
            keep=keep,
            threads=threads,
            logits=logits if keep else None,
            argmax=argmax if keep else None,
            own_logits=top is not None,
        )
        if logits is not None and self.ranks is not None and top is not None:
            vocab = self.weights.vocab
            logits = self.ranks.largest(logits[..., vocab.start : vocab.stop], top)
        self.clock.add(phase, self._step.stamps, head=keep > 0)
        return (argmax if greedy else logits) if keep else None

    def _by_stages(self, batch: int, hidden_states: list[Tensor] | None) -> bool:
        """Whether a step runs op by op: somebody looks on, or it brings more rows than the exchange has room for."""
        return hidden_states is not None or listening() or (self.ranks is not None and batch > CHUNK_ROWS)

    def _run_stages(
        self,
        tokens_BT: Tensor,
        rows: Rows,
        rotary: Rotary | None,
        cache: KVCache,
        phase: Phase,
        keep: int,
        greedy: bool,
        top: int | None,
        hidden_states: list[Tensor] | None,
    ) -> Tensor | None:
        """The same step, one op at a time under the stage ranges: for profilers, hidden states and the reference."""
        threads, w = torch.get_num_threads(), self.weights
        with stage(phase, Stage.EMBED):
            hidden_NH = self._embed(tokens_BT, rows)
        for layer in self.layers:
            if hidden_states is not None:  # after a post-norm layer its last norm is due, which waits in the next layer
                seen = hidden_NH if self.model_config.pre_norm else normalise(layer.weights.qkv.norm, hidden_NH)
                hidden_states.append(seen.view(rows.batch, rows.tokens, -1))
            hidden_NH = layer(hidden_NH, rows, rotary, cache, phase, threads)
        if not keep:
            return None
        with stage(phase, Stage.LM_HEAD):
            kept = hidden_NH.view(rows.batch, rows.tokens, -1)
            if hidden_states is None:
                kept = kept[:, -keep:]
            normed = normalise(w.final_norm, kept.flatten(0, 1).contiguous())
            if w.project_out is not None:
                normed = gemm(normed, w.project_out, threads=threads, impl=self.impl)
            if hidden_states is not None:
                hidden_states.append(normed.view(rows.batch, rows.tokens, -1))
                normed = hidden_states[-1][:, -keep:].flatten(0, 1).contiguous()
            logits = gemm(normed, w.head, threads=threads, impl=self.impl).view(rows.batch, keep, -1)
            if self.ranks is not None:
                logits = self.ranks.side_by_side(logits) if top is None else self.ranks.largest(logits, top)
            return argmax_or_minus_one(logits) if greedy else logits

    def _embed(self, tokens_BT: Tensor, rows: Rows) -> Tensor:
        w = self.weights
        hidden = self._look_up(tokens_BT.flatten())
        hidden = normalise(w.embedding_norm, hidden)
        if w.project_in is not None:
            hidden = gemm(hidden, w.project_in, threads=torch.get_num_threads(), impl=self.impl)
        if w.positions is not None:
            hidden = hidden + w.positions[rows.positions.long() + w.position_offset]
        return hidden.contiguous()

    def _look_up(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding table, float32 [tokens, E]; a rank has some, and the sum of all ranks is whole."""
        w = self.weights

        def found(rows: Tensor) -> Tensor:
            return unpack_rows(w.head, rows) if w.embedding is None else w.embedding[rows].float()

        if self.ranks is None:
            return found(tokens)
        here = (tokens >= w.vocab.start) & (tokens < w.vocab.stop)
        mine = found(torch.where(here, tokens - w.vocab.start, 0))
        return self.ranks.sum(torch.where(here[:, None], mine, 0.0).contiguous())

    def _rotary_for(self, reach: int) -> Rotary | None:
        """Cosine and sine tables of at least `reach` positions; they grow by doubling."""
        spec = self.model_config.rotary
        if spec is None:
            return None
        if self._rotary is None or len(self._rotary.cosine) < reach:
            wanted = max(reach, 256, 2 * len(self._rotary.cosine) if self._rotary else 0)
            self._rotary = rotary_tables(spec, wanted, self._device)
        return self._rotary

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's `generate`: same arguments, same results. Raises ValueError for an empty prompt."""
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if prompt is not None and not isinstance(prompt, Tensor):
            raise UserTypeError(
                f"input_ids: expected a tensor [batch, tokens], got {type(prompt).__name__}; "
                "a tokenizer makes one with return_tensors='pt', padding=True"
            )
        if prompt is not None and prompt.numel() == 0:
            raise UserError(
                f"input_ids: expected at least one token, got shape {list(prompt.shape)}: the prompt is empty"
            )
        if self.ranks is None:
            return super().generate(inputs, *args, **kwargs)
        self.ranks.share_randomness()
        out = super().generate(inputs, *args, **kwargs)
        self.ranks.agree("the generated tokens", out if isinstance(out, Tensor) else out.sequences)
        return out

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        """One kind of cache, grown as needed, serves every `cache_implementation`; the caller's own stays."""
        if model_kwargs.get("past_key_values") is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **named)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache()

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Where `generate` arrives for greedy search and sampling, its preparation done: labkit's loop, unless the call
        asks for something that only transformers' own loop does. Beams and the rest never come here.
        """
        if runs_in_decode_loop(generation_config, model_kwargs):
            return decode_loop(
                self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, **model_kwargs
            )
        return super()._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _reorder_cache(self, past_key_values: KVCache, beam_idx: Tensor) -> KVCache:
        past_key_values.reorder_cache(beam_idx)
        return past_key_values

    @contextmanager
    def stage_by_stage(self) -> Iterator[None]:
        """Within the block every step runs op by op, as under a profiler: to test it, and to measure what it costs."""
        step, self._step = self._step, None
        try:
            yield
        finally:
            self._step = step


def rotary_tables(spec: RotarySpec, positions: int, device: torch.device | None = None) -> Rotary:
    """Cosine and sine of the first `positions` positions."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), torch.tensor(spec.inv_freq))
    cosine, sine = (table.mul(spec.attention_scaling).to(device) for table in (angles.cos(), angles.sin()))
    return Rotary(cosine, sine, spec.interleaved)


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts `module` where the original model has its layers: `model.transformer.h[0]` is the first fused layer."""
    *parents, name = path.split(".")
    for parent in parents:
        child = nn.Module()
        root.add_module(parent, child)
        root = child
    root.add_module(name, module)
