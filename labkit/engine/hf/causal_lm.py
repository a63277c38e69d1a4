"""The fused model with the interface of a transformers model. It checks arguments, and passes steps to a runner."""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
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
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from labkit.engine.hf.beam_search import beam_loop, runs_in_beam_loop
from labkit.engine.hf.decode_loop import prompt_step, runs_in_decode_loop
from labkit.engine.hf.endings import known_end
from labkit.engine.hf.packed import PackedModule
from labkit.engine.hf.texts import GenerateTexts
from labkit.engine.hf.validation import (
    PAGED,
    check_generation,
    check_input_ids,
    check_keywords,
    check_prompt,
    check_special_tokens,
    check_tensors,
    usable_pad,
)
from labkit.engine.memory.adoption import adopt, check_made_like, hand_back
from labkit.engine.memory.keeping import KeptOnError
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.driving import drive
from labkit.engine.runners.layer import FusedLayer
from labkit.engine.runners.long_texts import outgrows
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import StepInput
from labkit.system.errors import UnsupportedError, UserError

T = TypeVar("T")
log = logging.getLogger("labkit")

IN_INT8 = "init_inference(..., kv_dtype=torch.int8) makes one whose cache has 8 bits"


def _by_all_ranks(call: Callable[..., T]) -> Callable[..., T]:
    """Decorates a method that all ranks of a model call together. It fails on all of them or on none."""

    @wraps(call)
    def shared(self: "FusedCausalLM", *args: Any, **kwargs: Any) -> T:
        with self.runner.shared_call(call.__name__):
            return call(self, *args, **kwargs)

    return shared


class FusedCausalLM(PackedModule, PreTrainedModel, GenerationMixin):
    """Decoder-only language model on fused kernels, with the attributes that `generate` and pipelines need.

    `forward` sums in float32 and returns float32 logits for weights of any type. Not for training.
    """

    main_input_name = "input_ids"

    def __init__(self, hf_config: PretrainedConfig, runner: Runner, layers: Sequence[FusedLayer]) -> None:
        """layers: modules that replace the layers of the original model."""
        hf_config = copy.deepcopy(hf_config)
        for choice in ("_attn_implementation", "_experts_implementation"):  # among transformers' kernels, not used here
            setattr(hf_config, choice, "eager")
        super().__init__(hf_config)
        layer_range, policy = runner.layer_range, runner.layer_range.spec.policy
        self.model_config, self.runner, self.weights = runner.config, runner, layer_range.weights
        self._device, self._token_types = layer_range.device, policy.token_types
        self._made_for_call: Callable[[], KVCache | None] = lambda: None  # cache of the latest call of `generate`
        _attach(self, policy.layers, nn.ModuleList(layers))
        self.eval()

    @property
    def layers(self) -> list[FusedLayer]:
        return [module for module in self.modules() if isinstance(module, FusedLayer)]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the cache. For quantised weights, the type of computation."""
        return self.weights.cache_dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the weights are packed already."""

    def new_cache(self, capacity: int = 0) -> KVCache:
        """Returns an empty cache, which reserves `capacity` slots per sequence at its first use."""
        return self.runner.layer_range.new_cache(capacity)

    @torch.no_grad()
    @_by_all_ranks
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: object,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """input_ids [B, T] after the tokens in `past_key_values` -> logits float32 [B, T or logits_to_keep, V].

        The arguments have the order of LlamaForCausalLM. Pass them by name: transformers' other models have others.

        attention_mask: [B, past + T], hides padding anywhere.
        position_ids: [B, T]; None: as in the model's own code in transformers, a count of the visible tokens or of all.
        logits_to_keep: number of last tokens, or indices of tokens.
        inputs_embeds: refused.
        others: arguments of transformers' loss besides `labels`. Keywords that would change the logits, and unknown
        keywords, are refused.

        The returned cache is a KVCache, which grows in place on the next call. A cache of transformers that is passed
        in gets the new keys and values, too, as with vanilla models, at the price of a copy on every call.
        """
        of_loss = check_keywords(others | {"inputs_embeds": inputs_embeds}, token_types=self._token_types)
        check_tensors(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels)
        ids = check_input_ids(input_ids)
        if output_attentions:
            raise UserError("fused attention keeps no attention weights; use the vanilla model for output_attentions")
        cache = self.own_cache(past_key_values, attention_mask)
        keep, chosen = _tokens_with_logits(logits_to_keep, ids.shape[1])
        step = StepInput(ids, cache, attention_mask, position_ids, keep=keep, hidden_states=bool(output_hidden_states))
        with KeptOnError(cache):
            computed = self.runner.begin(step).collect()
            assert computed.result is not None
            logits = computed.result if chosen is None else computed.result[:, chosen]
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
            hidden_states=computed.hidden_states if output_hidden_states else None,
        )
        return output if return_dict is not False else output.to_tuple()

    def own_cache(self, passed_in: Cache | None, attention_mask: Tensor | None = None) -> KVCache:
        """Returns `passed_in` if it is a KVCache, else a new KVCache with its contents.

        Raises ValueError for a KVCache of another engine, and for a cache of transformers if the layers are on several
        ranks.
        """
        own = self.new_cache()
        if isinstance(passed_in, KVCache):
            check_made_like(passed_in, own)
            return passed_in
        if passed_in is not None and self.runner.info.pipeline is not None:
            raise UnsupportedError(
                "past_key_values: got a cache of transformers, which has all layers, but the layers are on several "
                "ranks; give the KVCache that this engine returned, or None for a new one"
            )
        if passed_in is not None and passed_in.get_seq_length() > 0:
            adopt(own, passed_in, attention_mask)
        return own

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of `forward` in transformers' own loops. A text that outgrows its cache's rotation begins anew."""
        prepare = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, next_sequence_length, past_key_values, **kwargs)
        if past_key_values is None or self.model_config.short_positions is None:
            return inputs
        cache = self.own_cache(past_key_values, inputs.get("attention_mask"))
        step = StepInput(inputs["input_ids"], cache, inputs.get("attention_mask"), inputs.get("position_ids"))
        whole = cache.length + inputs["input_ids"].shape[1] == input_ids.shape[1]
        if not (whole and outgrows(step)):
            return inputs
        cache.reset()
        return prepare(input_ids, None, cache, **kwargs)

    @_by_all_ranks
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's `generate`: same arguments, same results. Raises ValueError for an empty prompt, and for ways
        to generate that need parts of transformers' model.
        """
        check_generation(kwargs)
        check_special_tokens(kwargs, args[0] if args else kwargs.get("generation_config"), self.generation_config)
        check_prompt(inputs if inputs is not None else kwargs.get("input_ids"))
        self.runner.before_generation()
        out = super().generate(inputs, *args, **kwargs)
        self.runner.after_generation(out if isinstance(out, Tensor) else out.sequences)
        return out

    def _prepare_special_tokens(self, generation_config: GenerationConfig, *rest: Any, **named: Any) -> None:
        """Calls transformers' method after it has made sure that the pad token is in the vocabulary, or None."""
        generation_config.pad_token_id = usable_pad(generation_config.pad_token_id, self.model_config.vocab_size)
        super()._prepare_special_tokens(generation_config, *rest, **named)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        """Makes a KVCache, which grows as needed, for every `cache_implementation`; keeps a cache of the caller. The
        cache is quantised if `init_inference` got `kv_dtype`; a request for a quantised cache here logs a warning.
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
        """Runs greedy search and sampling after the preparation of `generate`: in labkit's loop, or in transformers'
        own loop if the call needs it. Beam search and other modes do not call this.
        """
        if runs_in_decode_loop(generation_config, model_kwargs):
            passed_in = model_kwargs.pop("past_key_values", None)
            cache = self.own_cache(passed_in, model_kwargs.get("attention_mask"))
            texts = GenerateTexts(
                cache,
                own_cache=self._made_for_call() is cache,
                hf_cache=None if passed_in is cache else passed_in,
                tokens=input_ids,
                processors=logits_processor,
                criteria=stopping_criteria,
                config=generation_config,
                streamer=streamer,
                model_kwargs=model_kwargs,
            )
            return self.runner.decode(texts)
        return super()._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateBeamDecoderOnlyOutput:
        """Runs beam search after the preparation of `generate`: in labkit's loop on the CPU, or in transformers' own
        loop if the call needs it.
        """
        cache, end = model_kwargs.get("past_key_values"), known_end(stopping_criteria)
        on_cpu = isinstance(cache, KVCache) and cache.device.type == input_ids.device.type == "cpu"
        known = runs_in_decode_loop(generation_config, model_kwargs) and runs_in_beam_loop(generation_config)
        if isinstance(cache, KVCache) and end is not None and on_cpu and known:
            check_made_like(cache, self.new_cache())
            prompt = prompt_step(cache, input_ids, stopping_criteria, generation_config, model_kwargs)
            loop = beam_loop(prompt, input_ids, logits_processor, end, generation_config)
            return drive(self.runner.begin, [loop], used=self.runner.clock.chose)[0]
        return super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"continuous batching {PAGED}")

    def get_input_embeddings(self) -> NoReturn:
        raise UnsupportedError("the embedding is packed for the kernels and is no module; use the original model's")

    def get_output_embeddings(self) -> NoReturn:
        raise UnsupportedError("the LM head is packed for the kernels and is no module; use the original model's")


def _tokens_with_logits(logits_to_keep: int | Tensor, tokens: int) -> tuple[int, Tensor | None]:
    """Returns the number of last tokens that need logits, and the indices of the requested ones (None: all)."""
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
    """Puts `module` at the path of the original model's layers: `model.transformer.h[0]` is the first fused layer."""
    *parents, name = path.split(".")
    for parent in parents:
        child = nn.Module()
        root.add_module(parent, child)
        root = child
    root.add_module(name, module)
