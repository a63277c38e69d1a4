"""The config of Phi-4-mini, whose rotation has other frequencies in long texts, and small models of it."""

from typing import Any

from helpers.models.any_models import any_model
from transformers import PreTrainedModel

from labkit.models.derived.small_config import SHORT_POSITIONS

SHORT = SHORT_POSITIONS  # tokens of the longest short text of the small models
_LONG_FACTORS = (
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)
PHI_4_MINI: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [*_LONG_FACTORS]},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "pad_token_id": 199999,
}


def long_rope_model(**changes: Any) -> PreTrainedModel:
    """A small Phi-4-mini with random weights. It has no window, so that a token sees keys at all distances, and a head
    of its own: a tied one repeats the last token.
    """
    return any_model("phi3", **PHI_4_MINI | {"sliding_window": None, "tie_word_embeddings": False} | changes)
