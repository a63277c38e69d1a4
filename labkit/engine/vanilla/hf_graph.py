"""transformers' own decode step as a CUDA graph: vanilla without the launch times of its kernels.

The fused engine's gain over this is due to the kernels alone. The gain of this over eager is due to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from labkit.system.errors import UserError

WARM_UP_STEPS = 3  # in these, libraries choose their kernels and allocate memory, before the recording


class GraphedModel:
    """Vanilla model that generates greedily. Each decode step replays one CUDA graph; the prompt runs outside of it.

    The graph is recorded for one number of sequences and of slots, and again when a call has other numbers. Attention
    spans all slots of a static cache, so the cache has no more slots than the call needs. `graph=False`: the same step
    is launched op by op, on any device.

    Raises ValueError for a model that transformers cannot run on a static cache.
    """

    def __init__(self, model: PreTrainedModel, *, graph: bool = True) -> None:
        check_static_cache(model)
        self.model, self.graph = model, graph
        self._step: StaticStep | None = None

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        do_sample: bool = False,
        num_beams: int = 1,
        min_new_tokens: int | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """input_ids [B, T] -> [B, T + max_new_tokens].

        Generation does not stop at the end of a text, so `min_new_tokens` and `pad_token_id` have no effect.
        `attention_mask` [B, T] may hide padding on the left. Raises ValueError for other modes than greedy search.
        """
        if do_sample or num_beams != 1:
            raise UserError(f"got do_sample={do_sample}, num_beams={num_beams}, expected greedy search; use hf-eager")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        batch, length = input_ids.shape
        step = self._step_for(batch, length + max_new_tokens - 1)  # the last token is never read
        if streamer is not None:
            streamer.put(input_ids.cpu())
        step.prefill(input_ids, mask)
        sequences = [input_ids]
        while True:
            sequences.append(step.tokens.clone())
            if streamer is not None:
                streamer.put(step.tokens[:, 0].cpu())
            if len(sequences) > max_new_tokens:
                break
            step.advance()
        if streamer is not None:
            streamer.end()
        return torch.cat(sequences, dim=1)

    def _step_for(self, batch: int, slots: int) -> StaticStep:
        if self._step is None or self._step.shape != (batch, slots):
            self._step = None  # frees its memory first
            step = StaticStep(self.model, batch, slots)
            if self.graph:
                step.record()
            self._step = step
        return self._step


class StaticStep:
    """Step of one token for each of `batch` sequences. Reads and advances `tokens`, `positions` [B, 1] and the cache.

    All tensors keep their addresses, and the lengths of sequences are in tensors only, as a graph needs it.
    """

    def __init__(self, model: PreTrainedModel, batch: int, slots: int) -> None:
        self.model, self.shape = model, (batch, slots)
        self.cache = StaticCache(config=model.config, max_cache_len=slots)
        # transformers' sliding-window layers count tokens in Python. Instead, the mask hides tokens outside a window.
        self.cache.layers = [StaticLayer(max_cache_len=slots) for _ in self.cache.layers]
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.visible = torch.ones(batch, slots, dtype=torch.int64, device=model.device)
        self._replay: Callable[[], None] | None = None

    def prefill(self, input_ids: Tensor, mask: Tensor) -> None:
        """Runs a prompt on an empty cache, and puts its first new token into `tokens`."""
        length = input_ids.shape[1]
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        self.cache.reset()
        self.visible.fill_(1)[:, :length] = mask
        inputs = self.model.prepare_inputs_for_generation(
            input_ids,
            past_key_values=self.cache,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            is_first_iteration=True,
        )
        self._choose(self.model(**inputs, return_dict=True).logits)
        self.positions.copy_(positions[:, -1:] + 1)

    def advance(self) -> None:
        """Runs the step: replays the graph if it is recorded."""
        (self._replay or self.launch)()

    def launch(self) -> None:
        """Runs the step op by op."""
        with NumbersOnDevice():
            output = self.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                attention_mask=self.visible,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
            )
        self._choose(output.logits)
        self.positions.add_(1)

    def record(self) -> None:
        """Records the graph. Earlier contents of the cache and the tensors are lost."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._rewind()
                self.launch()
            self._rewind()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        self._replay = graph.replay

    def _rewind(self) -> None:
        self.cache.reset()
        self.positions.zero_()

    def _choose(self, logits: Tensor) -> None:
        self.tokens.copy_(logits[:, -1].float().argmax(dim=-1, keepdim=True))


class NumbersOnDevice(TorchFunctionMode):
    """Context in which `torch.tensor(number, device=...)` is filled on the device.

    Otherwise the number is copied from the host, which a graph cannot record. transformers' masks contain one (5.17).
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], int | float):
            return torch.full((), *args, **kwargs or {})
        return func(*args, **kwargs or {})


def check_static_cache(model: PreTrainedModel) -> None:
    """Raises ValueError for a model without a static cache in transformers: GPT-Neo, whose tokens would be wrong."""
    if not model._can_compile_fullgraph:
        raise UserError(
            f"got a {type(model).__name__}, expected a model that transformers can run on a static cache; use hf-eager"
        )
