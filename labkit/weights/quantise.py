"""How int8 weights are stored."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True)


class WeightQuantization(Strict):
    enabled: bool = True
    num_bits: Literal[8] = 8
    q_type: Literal["symmetric"] = "symmetric"
    q_groups: int = Field(default=1, ge=1)


class Quantization(Strict):
    """What dtype=int8 means: weights only, in `weight.q_groups` groups per output row, each with its own scale, and
    the LM head too with `lm_head` (labkit's own).
    """

    enabled: bool = True
    weight: WeightQuantization = WeightQuantization()
    lm_head: bool = False

    @property
    def groups(self) -> int:
        return self.weight.q_groups
