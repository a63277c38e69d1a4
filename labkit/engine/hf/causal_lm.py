"""The fused model as transformers knows models: it checks what it is given and hands steps to a runner."""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from time import perf_counter
from typing import Any, NoReturn, TypeVar

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

from labkit.engine.hf.decode_loop import runs_in_decode_loop
from labkit.engine.hf.packed import PackedModule
from labkit.engine.hf.texts import GenerateTexts
from labkit.engine.hf.validation import check_input_ids, check_keywords, check_prompt, check_tensors, usable_pad
from labkit.engine.memory.adoption import adopt, check_made_like, hand_back
from labkit.engine.memory.keeping import KeptOnError
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.checks import check_reach, check_step
from labkit.engine.runners.layer import FusedLayer
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import Pending, StepInput, StepOutput
from labkit.kernels.decode_step.weights import ModelWeights
from labkit.models.config import ModelConfig
from labkit.models.policies import Policy
from labkit.system.errors import UnsupportedError, UserError

T = TypeVar("T")
log = logging.getLogger("labkit")

IN_INT8 = "init_inference(..., kv_dtype=torch.int8) makes one whose cache has 8 bits"


def _by_all_ranks(call: Callable[..., T]) -> Callable[..., T]:
    """A method that every rank of a model calls alike: it fails on all of them or on none."""

    @wraps(call)
    def made(self: "FusedCausalLM", *args: Any, **kwargs: Any) -> T:
        with self.runner.shared_call(call.__name__):
            return call(self, *args, **kwargs)

    return made


class FusedCausalLM(PackedModule, PreTrainedModel, GenerationMixin):
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
        runner: Runner,
        layers: Sequence[FusedLayer],
        weights: ModelWeights,
        device: torch.device,
    ) -> None:
        """weights: of the layers that are here, on `device`."""
        hf_config = copy.deepcopy(hf_config)
        hf_config._attn_implementation = "eager"  # transformers' choice among its own kernels means nothing here
        super().__init__(hf_config)
        self.model_config, self.runner, self.weights = config, runner, weights
        self.step_times_ms: list[float] | None = None  # appended to by every step once somebody puts a list here
        self._device, self._token_types = device, policy.token_types
        self._made_for_call: Callable[[], KVCache | None] = lambda: None  # by the latest call of `generate`
        _attach(self, policy.layers, nn.ModuleList(layers))
        self.eval()

    @property
    def layers(self) -> list[FusedLayer]:
        return [module for module in self.modules() if isinstance(module, FusedLayer)]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, or what is computed with quantised ones, and of the cache."""
        return self.weights.cache_dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def _init_weights(self, module: nn.Module) -> None:
        """There is nothing to initialise: weights come packed."""

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache that reserves `capacity` slots per sequence when it is first used."""
        return self.runner.new_cache(capacity)

    @torch.no_grad()
    @_by_all_ranks
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: object,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """input_ids [B, T] after what `past_key_values` holds -> logits float32 [B, T or logits_to_keep, V].

        attention_mask [B, past + T] hides padding anywhere. Without `position_ids` [B, T] the positions are those that
        the model's own code in transformers takes: a count of the visible tokens, or of all. logits_to_keep: a
        number of last tokens, or the indices of tokens. others: what transformers' loss takes beside `labels`;
        keywords that would change the logits are refused, and so are unknown ones.
        The returned cache is a KVCache, which grows in place on the next call. A given cache of transformers is filled
        too, as vanilla models do, at the price of a copy on every call.
        """
        of_loss = check_keywords(others, token_types=self._token_types)
        check_tensors(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels)
        ids = check_input_ids(input_ids)
        if output_attentions:
            raise UserError("fused attention keeps no attention weights; use the vanilla model for output_attentions")
        cache = self.own_cache(past_key_values, attention_mask)
        keep, chosen = _kept(logits_to_keep, ids.shape[1])
        step = StepInput(ids, cache, attention_mask, position_ids, keep=keep, hidden_states=bool(output_hidden_states))
        with KeptOnError(cache):
            found = self.step(step)
            assert found.result is not None
            logits = found.result if chosen is None else found.result[:, chosen]
            loss = None
            if labels is not None:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.model_config.vocab_size, **of_loss
                )
        if past_key_values is not None and past_key_values is not cache:
            hand_back(cache, past_key_values)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache is not False else None,
            hidden_states=found.hidden_states if output_hidden_states else None,
        )
        return output if return_dict is not False else output.to_tuple()

    def own_cache(self, given: Cache | None, attention_mask: Tensor | None = None) -> KVCache:
        """`given` itself if it is the engine's own kind, else a new one with what it holds.

        Raises ValueError for a KVCache that was made for another engine, and for one of transformers' where the layers
        are on several ranks.
        """
        own = self.new_cache()
        if isinstance(given, KVCache):
            check_made_like(given, own)
            return given
        if given is not None and self.runner.pipeline is not None:
            raise UnsupportedError(
                "past_key_values: got a cache of transformers', which has all layers, and these are on several ranks; "
                "give the KVCache that this engine returned, or None for a new one"
            )
        if given is not None and given.get_seq_length() > 0:
            adopt(own, given, attention_mask)
        return own

    def step(self, step: StepInput) -> StepOutput:
        """What comes of a step. Raises ValueError for one that the model cannot take."""
        return self.begin(step).collect()

    def begin(self, step: StepInput) -> Pending:
        """Begins a step, whose result can be collected later: others may be begun before."""
        start = perf_counter()
        if step.follows:
            check_reach(step.cache.reach + 1, self.model_config)
        else:
            check_step(step, self.model_config)
        with KeptOnError(step.cache, visible=step.follows):
            pending = self.runner.begin(step)
        return pending if self.step_times_ms is None else _Timed(pending, start, self.step_times_ms.append)

    @_by_all_ranks
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's `generate`: same arguments, same results. Raises ValueError for an empty prompt."""
        check_prompt(inputs if inputs is not None else kwargs.get("input_ids"))
        self.runner.before_generation()
        out = super().generate(inputs, *args, **kwargs)
        self.runner.after_generation(out if isinstance(out, Tensor) else out.sequences)
        return out

    def _prepare_special_tokens(self, generation_config: GenerationConfig, *rest: Any, **named: Any) -> None:
        """As transformers does, once the pad token is one of the vocabulary or none."""
        generation_config.pad_token_id = usable_pad(generation_config.pad_token_id, self.model_config.vocab_size)
        super()._prepare_special_tokens(generation_config, *rest, **named)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        """One kind of cache, grown as needed, serves every `cache_implementation`; the caller's own stays. It is
        quantised where `init_inference` was given `kv_dtype`: who asks for that here is told so.
        """
        if model_kwargs.get("past_key_values") is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **named)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = self.new_cache()
            if generation_config.cache_implementation == "quantized" and cache.kv_dtype != torch.int8:
                log.warning(
                    "labkit: cache_implementation='quantized': this engine's cache is %s; %s", cache.types, IN_INT8
                )
            self._made_for_call = weakref.ref(cache)

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
            given = model_kwargs.pop("past_key_values", None)
            cache = self.own_cache(given, model_kwargs.get("attention_mask"))
            texts = GenerateTexts(
                cache,
                own_cache=self._made_for_call() is cache,
                given=None if given is cache else given,
                input_ids=input_ids,
                processors=logits_processor,
                criteria=stopping_criteria,
                config=generation_config,
                streamer=streamer,
                model_kwargs=model_kwargs,
            )
            return self.runner.decode(self.begin, texts)
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

    def get_input_embeddings(self) -> NoReturn:
        raise UnsupportedError("the embedding is packed for the kernels and is no module; use the original model's")

    def get_output_embeddings(self) -> NoReturn:
        raise UnsupportedError("the LM head is packed for the kernels and is no module; use the original model's")


class _Timed:
    """A pending step whose milliseconds are noted when it is collected."""

    def __init__(self, pending: Pending, start: float, note: Callable[[float], None]) -> None:
        self._pending, self._start, self._note = pending, start, note

    def collect(self) -> StepOutput:
        found = self._pending.collect()
        self._note((perf_counter() - self._start) * 1e3)
        return found


def _kept(logits_to_keep: int | Tensor, tokens: int) -> tuple[int, Tensor | None]:
    """How many of the last tokens to compute logits for, and which of those are wanted (None: all)."""
    if not isinstance(logits_to_keep, Tensor):
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise UserError(f"logits_to_keep: expected a number of tokens from 0 on, got {logits_to_keep!r}")
        return logits_to_keep or tokens, None
    if logits_to_keep.is_floating_point() or (logits_to_keep.dtype == torch.bool and len(logits_to_keep) != tokens):
        raise UserError(
            f"logits_to_keep: expected indices, or a mask of {tokens} tokens, got {logits_to_keep.dtype} of shape "
            f"{list(logits_to_keep.shape)}"
        )
    indices = logits_to_keep.nonzero().flatten() if logits_to_keep.dtype == torch.bool else logits_to_keep.long()
    if indices.dim() != 1 or len(indices) == 0 or int(indices.min()) < -tokens or int(indices.max()) >= tokens:
        raise UserError(
            f"logits_to_keep: expected indices of {tokens} tokens in one dimension, got {logits_to_keep.tolist()}"
        )
    indices = torch.where(indices < 0, indices + tokens, indices)
    first = int(indices.min())
    return tokens - first, indices - first


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts `module` where the original model has its layers: `model.transformer.h[0]` is the first fused layer."""
    *parents, name = path.split(".")
    for parent in parents:
        child = nn.Module()
        root.add_module(parent, child)
        root = child
    root.add_module(name, module)
