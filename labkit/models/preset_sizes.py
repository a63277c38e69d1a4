"""The sizes of the presets, for listing them at once: `labkit.models.presets` takes seconds to load.

A test compares them with the configs of the presets, and prints the missing line of a new preset.
"""

from typing import NamedTuple


class PresetSize(NamedTuple):
    architecture: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    parameters: int  # a tied head counted once


PRESET_SIZES = {
    "tiny-gpt2": PresetSize("GPT2LMHeadModel", 2, 64, 4, 512, 263_936),
    "tiny-gptj": PresetSize("GPTJForCausalLM", 2, 64, 4, 512, 165_376),
    "tiny-bloom": PresetSize("BloomForCausalLM", 2, 64, 4, 512, 132_992),
    "tiny-llama": PresetSize("LlamaForCausalLM", 2, 64, 4, 512, 158_016),
    "tiny-moe": PresetSize("Qwen3MoeForCausalLM", 2, 64, 4, 512, 238_976),
    "gptj-shape": PresetSize("GPTJForCausalLM", 12, 1024, 16, 50400, 254_352_608),
    "llama-shape": PresetSize("LlamaForCausalLM", 24, 1024, 16, 32000, 373_867_520),
    "moe-shape": PresetSize("Qwen3MoeForCausalLM", 12, 768, 12, 32000, 408_080_640),
    "gpt-oss-shape": PresetSize("GptOssForCausalLM", 12, 768, 12, 32000, 408_694_032),
    "qwen3-moe-shape": PresetSize("Qwen3MoeForCausalLM", 12, 2048, 32, 32000, 2_170_344_448),
    "smollm2-135m": PresetSize("LlamaForCausalLM", 30, 576, 9, 49152, 134_515_008),
    "smollm2-shape": PresetSize("LlamaForCausalLM", 30, 576, 9, 49152, 134_515_008),
    "distilgpt2": PresetSize("GPT2LMHeadModel", 6, 768, 12, 50257, 81_912_576),
    "gpt2": PresetSize("GPT2LMHeadModel", 12, 768, 12, 50257, 124_439_808),
    "gpt2-medium": PresetSize("GPT2LMHeadModel", 24, 1024, 16, 50257, 354_823_168),
    "gpt2-large": PresetSize("GPT2LMHeadModel", 36, 1280, 20, 50257, 774_030_080),
    "gpt2-xl": PresetSize("GPT2LMHeadModel", 48, 1600, 25, 50257, 1_557_611_200),
    "gpt-j-6b": PresetSize("GPTJForCausalLM", 28, 4096, 16, 50400, 6_050_882_784),
    "gpt-neo-125m": PresetSize("GPTNeoForCausalLM", 12, 768, 12, 50257, 125_198_592),
    "gpt-neo-1.3b": PresetSize("GPTNeoForCausalLM", 24, 2048, 16, 50257, 1_315_575_808),
    "gpt-neo-2.7b": PresetSize("GPTNeoForCausalLM", 32, 2560, 20, 50257, 2_651_307_520),
    "gpt-neox-20b": PresetSize("GPTNeoXForCausalLM", 44, 6144, 64, 50432, 20_554_567_680),
    "pythia-70m": PresetSize("GPTNeoXForCausalLM", 6, 512, 8, 50304, 70_426_624),
    "pythia-160m": PresetSize("GPTNeoXForCausalLM", 12, 768, 12, 50304, 162_322_944),
    "pythia-410m": PresetSize("GPTNeoXForCausalLM", 24, 1024, 16, 50304, 405_334_016),
    "pythia-1b": PresetSize("GPTNeoXForCausalLM", 16, 2048, 8, 50304, 1_011_781_632),
    "pythia-1.4b": PresetSize("GPTNeoXForCausalLM", 24, 2048, 16, 50304, 1_414_647_808),
    "pythia-2.8b": PresetSize("GPTNeoXForCausalLM", 32, 2560, 32, 50304, 2_775_208_960),
    "pythia-6.9b": PresetSize("GPTNeoXForCausalLM", 32, 4096, 32, 50432, 6_857_302_016),
    "pythia-12b": PresetSize("GPTNeoXForCausalLM", 36, 5120, 40, 50688, 11_846_072_320),
    "bloom-560m": PresetSize("BloomForCausalLM", 24, 1024, 16, 250880, 559_214_592),
    "bloom-1b7": PresetSize("BloomForCausalLM", 24, 2048, 16, 250880, 1_722_408_960),
    "bloom-3b": PresetSize("BloomForCausalLM", 30, 2560, 32, 250880, 3_002_557_440),
    "bloom-7b1": PresetSize("BloomForCausalLM", 30, 4096, 32, 250880, 7_069_016_064),
    "bloom-176b": PresetSize("BloomForCausalLM", 70, 14336, 112, 250880, 176_247_271_424),
    "opt-125m": PresetSize("OPTForCausalLM", 12, 768, 12, 50272, 125_239_296),
    "opt-350m": PresetSize("OPTForCausalLM", 24, 1024, 16, 50272, 331_196_416),
    "opt-1.3b": PresetSize("OPTForCausalLM", 24, 2048, 32, 50272, 1_315_758_080),
    "opt-2.7b": PresetSize("OPTForCausalLM", 32, 2560, 32, 50272, 2_651_596_800),
    "opt-6.7b": PresetSize("OPTForCausalLM", 32, 4096, 32, 50272, 6_658_473_984),
    "opt-13b": PresetSize("OPTForCausalLM", 40, 5120, 40, 50272, 12_853_473_280),
    "opt-30b": PresetSize("OPTForCausalLM", 48, 7168, 56, 50272, 29_974_540_288),
    "llama-2-7b": PresetSize("LlamaForCausalLM", 32, 4096, 32, 32000, 6_738_415_616),
    "llama-2-13b": PresetSize("LlamaForCausalLM", 40, 5120, 40, 32000, 13_015_864_320),
    "llama-2-70b": PresetSize("LlamaForCausalLM", 80, 8192, 64, 32000, 68_976_648_192),
    "llama-3.2-1b": PresetSize("LlamaForCausalLM", 16, 2048, 32, 128256, 1_235_814_400),
    "llama-3-8b": PresetSize("LlamaForCausalLM", 32, 4096, 32, 128256, 8_030_261_248),
    "tinyllama-1.1b": PresetSize("LlamaForCausalLM", 22, 2048, 32, 32000, 1_100_048_384),
    "mistral-7b": PresetSize("MistralForCausalLM", 32, 4096, 32, 32000, 7_241_732_096),
    "qwen2-0.5b": PresetSize("Qwen2ForCausalLM", 24, 896, 14, 151936, 494_032_768),
    "qwen2-1.5b": PresetSize("Qwen2ForCausalLM", 28, 1536, 12, 151936, 1_543_714_304),
    "qwen2-7b": PresetSize("Qwen2ForCausalLM", 28, 3584, 28, 152064, 7_615_616_512),
    "qwen3-0.6b": PresetSize("Qwen3ForCausalLM", 28, 1024, 16, 151936, 596_049_920),
    "qwen3-1.7b": PresetSize("Qwen3ForCausalLM", 28, 2048, 16, 151936, 1_720_574_976),
    "qwen3-4b": PresetSize("Qwen3ForCausalLM", 36, 2560, 32, 151936, 4_022_468_096),
    "qwen3-8b": PresetSize("Qwen3ForCausalLM", 36, 4096, 32, 151936, 8_190_735_360),
    "gemma-2-2b": PresetSize("Gemma2ForCausalLM", 26, 2304, 8, 256000, 2_614_341_888),
    "gemma-2-9b": PresetSize("Gemma2ForCausalLM", 42, 3584, 16, 256000, 9_241_705_984),
    "gemma-2-27b": PresetSize("Gemma2ForCausalLM", 46, 4608, 32, 256000, 27_227_128_320),
    "mixtral-8x7b": PresetSize("MixtralForCausalLM", 32, 4096, 32, 32000, 46_702_792_704),
    "granite-moe-1b": PresetSize("GraniteMoeForCausalLM", 24, 1024, 16, 49155, 1_334_628_352),
    "olmoe-1b-7b": PresetSize("OlmoeForCausalLM", 16, 2048, 16, 50304, 6_919_161_856),
    "qwen1.5-moe": PresetSize("Qwen2MoeForCausalLM", 24, 2048, 16, 151936, 14_315_784_192),
    "qwen3-30b-a3b": PresetSize("Qwen3MoeForCausalLM", 48, 2048, 32, 151936, 30_532_122_624),
    "gpt-oss-20b": PresetSize("GptOssForCausalLM", 24, 2880, 64, 201088, 20_914_757_184),
    "gpt-oss-120b": PresetSize("GptOssForCausalLM", 36, 2880, 64, 201088, 116_829_156_672),
}
