"""The least work of a model without a row: what its matrices cost, without its cache and the rest of its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from labkit.engine.injected.experts import InjectedMixture, stacked_experts
from labkit.engine.injected.modules import packed_matrices
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.roofline import Work
from labkit.harness.stored_weights import StoredWeights, Weights
from labkit.models.derived.small_config import EXPERT_COUNTS, EXPERTS_CHOSEN


class MatrixNumbers(FrozenRecord):
    """The numbers in the matrices of a model.

    dense: by which every token is multiplied.
    experts: of all experts.
    chosen: the share of the experts by which a token is multiplied.
    """

    dense: int
    experts: int = 0
    chosen: float = 1.0

    @property
    def of_a_token(self) -> float:
        return self.dense + self.experts * self.chosen

    def read(self, batch: int) -> float:
        """The numbers that a step of `batch` tokens reads.

        If each of b tokens chooses k of E experts, all with the same chance, the step reads E (1 - (1 - k / E)^b)
        experts on the average.
        """
        return self.dense + self.experts * (1 - (1 - self.chosen) ** batch)


def matrix_numbers(model: Any) -> MatrixNumbers | None:
    """The numbers in the matrices of transformers' model or of an engine with hooks.

    None: it is not known which of them a token is multiplied by (an encoder, experts of other kinds), or the model has
    no such matrices.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or getattr(config, "is_encoder_decoder", False):
        return None
    text = config.get_text_config(decoder=True)
    count, chosen = (
        next((number for name in names if (number := getattr(text, name, None))), 1)
        for names in (EXPERT_COUNTS, EXPERTS_CHOSEN)
    )
    layers, head = packed_matrices(model)
    numbers = {id(matrix): matrix.outputs * matrix.inputs for matrix in (*layers, *head)}
    mixtures = [module for module in model.modules() if isinstance(module, InjectedMixture)]
    experts = sum(numbers.pop(id(matrix)) for mixture in mixtures for matrix in mixture.matrices)
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            numbers[id(module.weight)] = module.weight.numel()
        elif stacked := stacked_experts(module):
            experts += stacked.first.numel() + stacked.second.numel()
    dense = sum(numbers.values())
    if not dense or (count > 1 and not (experts and 0 < chosen <= count)):
        return None
    return MatrixNumbers(dense=dense, experts=experts, chosen=chosen / count)


def work_of_matrices(numbers: MatrixNumbers, weights: Weights, batch: int, prompt: int) -> Work:
    """The work of `batch` sequences. A step reads each of the dense numbers once, and the numbers of the experts that
    its tokens choose (`MatrixNumbers.read`).
    """
    if isinstance(weights, StoredWeights):
        whole = weights.bytes or (numbers.dense + numbers.experts) * weights.bits / 8
        read = whole - (numbers.dense + numbers.experts - numbers.read(batch)) * weights.bits / 8
    else:
        size = torch.empty(0, dtype=weights).element_size()
        whole, read = (numbers.dense + numbers.experts) * size, numbers.read(batch) * size
    return Work(
        decode_bytes=float(read),
        decode_flops=2.0 * numbers.of_a_token * batch,
        prefill_flops=2.0 * numbers.of_a_token * batch * prompt,
        weight_bytes=round(whole),
        kv_bytes=0,
    )
