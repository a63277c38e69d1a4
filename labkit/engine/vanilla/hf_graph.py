"""transformers' own decode step as a CUDA graph: vanilla without the time that launching its kernels takes.

What the fused engine gains over this is the kernels' merit alone; what this gains over eager is the graph's.
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

WARM_UP_STEPS = 3  # libraries choose their kernels and take their memory before the recording


class GraphedModel:
    """A vanilla model that generates greedily, each decode step a replay of one CUDA graph; the prompt is outside it.

    The graph is recorded for one number of sequences and of slots, and anew when a call has others, so that attention,
    which spans all slots of a static cache, spans no more than the call needs. `graph=False`: the same step, launched
    op by op, on any device.

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

        An end of text is a token like any other, so `min_new_tokens` and `pad_token_id` change nothing.
        `attention_mask` [B, T] may hide padding on the left. Raises ValueError for anything but greedy search.
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
            self._step = None  # its memory makes room
            step = StaticStep(self.model, batch, slots)
            if self.graph:
                step.record()
            self._step = step
        return self._step


class StaticStep:
    """One more token for each of `batch` sequences: reads and moves on `tokens`, `positions` [B, 1] and the cache.

    All of them keep their addresses, and how far a sequence is stands in tensors only, as a graph needs it.
    """

    def __init__(self, model: PreTrainedModel, batch: int, slots: int) -> None:
        self.model, self.shape = model, (batch, slots)
        self.cache = StaticCache(config=model.config, max_cache_len=slots)
        # transformers' layers with a sliding window count in Python. Without them the mask alone hides what is outside.
        self.cache.layers = [StaticLayer(max_cache_len=slots) for _ in self.cache.layers]
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.visible = torch.ones(batch, slots, dtype=torch.int64, device=model.device)
        self._replay: Callable[[], None] | None = None

    def prefill(self, input_ids: Tensor, mask: Tensor) -> None:
        """Starts anew with a prompt: leaves its first new token in `tokens`."""
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
        """The step, from its graph once it is recorded."""
        (self._replay or self.launch)()

    def launch(self) -> None:
        """The step, op by op."""
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
        """Records the graph. What the cache and the tensors held before is lost."""
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
    """Within it, `torch.tensor(number, device=...)` is filled in on the device.

    It would be copied there from the host, which a graph cannot record. transformers' masks had such a number (5.17).
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and isinstance(args[0], int | float):
            return torch.full((), *args, **kwargs or {})
        return func(*args, **kwargs or {})


def check_static_cache(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that transformers has no static cache for: GPT-Neo, whose tokens would be wrong."""
    if not model._can_compile_fullgraph:
        raise UserError(
            f"got a {type(model).__name__}, expected a model that transformers can run on a static cache; use hf-eager"
        )
