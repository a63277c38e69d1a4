"""`hf-pipeline`: transformers' own pipeline, which has one batch on its way through the stages at a time.

Every rank has as many layers, the last one those left over, and gets all logits of every step from the last one.
Its `generate` (transformers 5.23) gives other tokens than one process for rows that are padded, while a `forward` of
the same rows is equal; comparisons have no padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, __version__
from transformers.distributed import DistributedConfig

from labkit.harness.compare.baselines import Baseline, comparison_device
from labkit.harness.compare.provider import Provider, Room
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.source import ModelSource, empty_model

HF_PIPELINE = "hf-pipeline"
PARTS = ("layers", "embed_tokens", "norm")  # that transformers replaces on the ranks which do not have them


class HfPipeline(Provider):
    """`from_pretrained(distributed_config=DistributedConfig(pp_size=P))` on each of P ranks that have met."""

    staged: ClassVar[bool] = True

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if comparison_device().type != "cpu":
            raise UserError(f"{side} is a side on CPUs only; hide the GPU with CUDA_VISIBLE_DEVICES=-1")

    def check_model(self, side: str, source: ModelSource) -> None:
        model = empty_model(source.hf_config, torch.float32)
        if missing := [part for part in PARTS if not hasattr(model.base_model, part)]:
            raise UserError(
                f"{side}: transformers' pipeline needs a model with {', '.join(PARTS)}, and {type(model).__name__} has "
                f"no {', '.join(missing)}; take fused-pp2-naive, which has one batch on its way at a time too"
            )

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        write_checkpoint(source, FLOAT_DTYPES[dtype], folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        torch.set_num_threads(room.threads)
        stages = dist.get_world_size()
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            distributed_config=DistributedConfig(pp_size=stages),
            trust_remote_code=False,
        )
        how = f"pipeline of {stages} stages, {model.config._attn_implementation} attention"
        return Baseline(side, f"transformers {__version__}, {how}", dtype, model.eval(), source.tokenizer)
