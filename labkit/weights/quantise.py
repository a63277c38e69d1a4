"""How int8 weights are stored."""

from typing import Literal

from pydantic import Field

from labkit.system.validation import Strict


class WeightQuantization(Strict):
    enabled: bool = True
    num_bits: Literal[8] = 8
    q_type: Literal["symmetric"] = "symmetric"
    q_groups: int = Field(default=1, ge=1)


class Quantization(Strict):
    """How dtype=int8 stores the matrices of the layers: each output row in `weight.q_groups` groups, each group with a
    scale of its own. Activations are not quantised. `lm_head`, an option of labkit's own, includes the LM head.
    """

    enabled: bool = True
    weight: WeightQuantization = WeightQuantization()
    lm_head: bool = False

    @property
    def groups(self) -> int:
        return self.weight.q_groups
