import torch

from labkit.models.policies import model_config_of
from labkit.models.preset_sizes import PRESET_SIZES, PresetSize
from labkit.models.presets import PRESETS


def test_the_listed_sizes_are_those_of_the_configs() -> None:
    expected = {}
    for name, preset in PRESETS.items():
        config = model_config_of(preset.hf_config)
        sizes = (config.num_layers, config.hidden_size, config.num_heads, config.vocab_size)
        expected[name] = PresetSize(config.architecture, *sizes, parameters=config.weight_bytes(torch.int8))
    assert expected == PRESET_SIZES
    assert list(expected) == list(PRESET_SIZES)
