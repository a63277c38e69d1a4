"""What each rank of a pipeline runs to test logits processors that know the rows of a batch one by one."""

from typing import Any

import torch
from helpers.ranks.cut_models import NEW
from helpers.ranks.pipelined_models import piped, whole

ROWS = 5
BY_ROW: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.4},
    {"encoder_repetition_penalty": 1.3},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1, "num_return_sequences": 2, "do_sample": True},
    {"encoder_repetition_penalty": 0.6, "repetition_penalty": 1.2, "eos_token_id": list(range(1, 12))},
    {"guidance_scale": 1.5},
)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [ROWS, 9] and a mask; every row but the last starts with a different number of padding tokens."""
    ids = torch.randint(1, 131, (ROWS, 9), generator=torch.Generator().manual_seed(6))
    mask = torch.stack([(torch.arange(9) >= ROWS - 1 - row).long() for row in range(ROWS)])
    return ids * mask, mask


def by_row() -> dict[str, bool]:
    """Whether the tokens match a single process, with and without padding, in several micro-batches."""
    single_process, engine, equal = whole("llama"), piped("llama", 2, micro_batches=3), {}
    ids, mask = padded()
    for options in BY_ROW:
        for name, visible in (("padded", mask), ("whole", torch.ones_like(mask))):
            arguments = {
                "attention_mask": visible,
                "max_new_tokens": NEW,
                "pad_token_id": 0,
                "do_sample": False,
            } | options
            texts = []
            for model in (single_process, engine):
                torch.manual_seed(3)
                texts.append(model.generate(ids, **arguments))
            equal[f"{options}, {name}"] = torch.equal(*texts)
    return equal
