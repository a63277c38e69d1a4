"""`hf-pipeline`: transformers' own pipeline, with one batch at a time on its way through the stages.

Every rank has equally many layers, and the last rank also has the remainder. The last rank sends all logits of every
step to every rank. For padded rows its `generate` (transformers 5.23) gives other tokens than one process does, while a
`forward` of the same rows is equal; comparisons have no padding.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import FolderLoader, Room
from labkit.harness.compare.vanilla_sides import impl_of
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.source import ModelSource, empty_model

PARTS = ("layers", "embed_tokens", "norm")  # transformers replaces these on ranks that do not hold them


class HfPipeline(FolderLoader):
    """`from_pretrained(distributed_config=DistributedConfig(pp_size=P))` on each rank of a group of P ranks."""

    def check_model(self, side: str, source: ModelSource) -> None:
        model = empty_model(source.hf_config, torch.float32)
        if missing := [part for part in PARTS if not hasattr(model.base_model, part)]:
            raise UserError(
                f"{side}: transformers' pipeline needs a model with {', '.join(PARTS)}, and {type(model).__name__} has "
                f"no {', '.join(missing)}; use fused-pp2-naive, which also has one batch at a time on its way"
            )

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        write_checkpoint(source, FLOAT_DTYPES[dtype], folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        torch.set_num_threads(room.threads)
        stages = dist.get_world_size()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, distributed_config=DistributedConfig(pp_size=stages), trust_remote_code=False
        )
        impl = impl_of(f"pipeline of {stages} stages", model)
        return LoadedSide(side, impl, dtype, model.eval(), source.tokenizer, may_pause=False)
