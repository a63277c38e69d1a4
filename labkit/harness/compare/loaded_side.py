"""A side that is loaded: its model, its weights, and how to generate with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare.choosing import generation_arguments
from labkit.harness.stored_weights import Weights
from labkit.kernels.expert_store import ExpertStore
from labkit.kernels.gpu import CPU
from labkit.kernels.layer_stream import LayerStream

StageProbe = Callable[[Callable[[], object]], list[StageTime]]


def no_stages(run: Callable[[], object]) -> list[StageTime]:
    """Makes the call of a side whose stages cannot be timed."""
    run()
    return []


@dataclass(frozen=True)
class LoadedSide:
    """A model that is ready to generate."""

    name: str
    impl: str  # libraries and kernels, in words
    weights: Weights  # stored type of the matrices
    model: Any
    tokenizer: Any
    stage_times: StageProbe = no_stages  # makes a call and returns its stages; none where they cannot be timed
    options: Mapping[str, Any] = field(default_factory=dict)  # of `generate`
    inputs_on: torch.device | None = None  # device of the inputs, if it differs from that of the weights
    stamps_ns: Callable[[], list[int]] | None = None  # for `timed_generate`, where a streamer would change the timing
    may_pause: bool = True  # whether each rank's streamer gets the tokens, and may wait as long as it likes

    @property
    def in_tensors(self) -> bool:
        """Whether torch's tensors hold the weights, rather than memory of another library."""
        return getattr(self.model, "weights_in_tensors", True)

    @property
    def pauses(self) -> bool:
        """Whether a generation can pause between two tokens, on all ranks."""
        return self.may_pause and self.stamps_ns is None

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        own: torch.device = getattr(self.model, "device", CPU)
        return self.inputs_on or own

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a decode step of the engine reads from the disk; 0 for other models."""
        streamed = getattr(self.model, "streamed", None)
        return 0 if streamed is None else streamed.bytes_per_step

    @property
    def expert_store(self) -> ExpertStore | None:
        """The experts that steps of the engine read from the disk by need; None for other models."""
        store: ExpertStore | None = getattr(self.model, "expert_store", None)
        return store

    @property
    def graph_nodes(self) -> tuple[tuple[str, str], ...]:
        """Kernel and stage of each node of the CUDA graph of the engine's latest step; empty for other models."""
        return tuple((node.kernel, node.stage) for node in getattr(self.model, "graph_nodes", ()))

    @property
    def replaced(self) -> tuple[str, ...]:
        """The parts of a model with hooks that run on labkit's kernels, in words; empty for other models."""
        return tuple(getattr(self.model, "replaced", ()))

    @property
    def reading(self) -> str:
        """How decode steps of the engine on a CPU read the weights, and how often that changed; empty for others."""
        return getattr(self.model, "reading", "")

    def rest(self) -> None:
        """Waits until no layer is read ahead for a next step, because that would disturb a probe of the disk."""
        streamed = getattr(self.model, "streamed", None)
        if streamed is not None and isinstance(streamed.stream, LayerStream):
            streamed.stream.rest()

    def arguments(self, batch: int, prompt: int, sample: str = "") -> dict[str, Any]:
        """Arguments of `generate`, except the number of new tokens, for `batch` prompts without padding. From now on an
        end-of-text token does not end a generation. sample: settings of sampling; empty: greedy search.
        """
        if (settings := getattr(self.model, "generation_config", None)) is not None:
            settings.eos_token_id = None  # so that no processor has to forbid an early end
        pad = self.config.pad_token_id
        return {
            "attention_mask": torch.ones((batch, prompt), dtype=torch.long),
            **generation_arguments(sample),
            "num_beams": 1,
            "pad_token_id": 0 if pad is None else pad,
        }

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Hugging Face's `generate`. Tensors may be on any device; the result is on the model's device."""
        moved = {key: value.to(self.device) if torch.is_tensor(value) else value for key, value in kwargs.items()}
        with torch.inference_mode():
            return self.model.generate(input_ids.to(self.device), **self.options, **moved)


def comparison_device() -> torch.device:
    """Device of all sides of a comparison: the current GPU, or the CPU of a machine without a GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
