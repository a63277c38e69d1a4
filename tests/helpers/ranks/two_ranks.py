"""All results of two ranks in one run: of a model whose layers are cut, and of one whose layers are divided."""

from typing import Any

from helpers.ranks.by_row import by_row
from helpers.ranks.cut_models import two_ranks
from helpers.ranks.divided_batches import divided_anew
from helpers.ranks.experts_apart import with_experts_apart
from helpers.ranks.pipelined_models import two_stages


def cut_and_divided(folder: str) -> dict[str, Any]:
    """`folder` contains a GGUF file, `model.gguf`, and a checkpoint that one process saved, `whole`."""
    cut = two_ranks(folder)
    experts = with_experts_apart(2, 2, folder)
    return cut | {"stages of two": two_stages(folder, divided_anew, by_row), "experts": experts}
