"""Files that an engine saves next to its weights. tests/engine/parallel tests what ranks save, load and continue."""

from pathlib import Path

import torch

import labkit
from labkit.weights.resolve import resolve


def test_text_files_of_the_source_come_along(tmp_path: Path) -> None:
    source = resolve("tiny-gpt2")
    source.hf_model(torch.float32).save_pretrained(tmp_path / "vanilla")
    source.tokenizer.save_pretrained(tmp_path / "vanilla")
    labkit.init_inference(resolve(tmp_path / "vanilla"), save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = resolve(tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").is_file()
    assert saved.tokenizer("fused")["input_ids"] == source.tokenizer("fused")["input_ids"]


def test_a_models_generation_config_is_kept(tmp_path: Path) -> None:
    model = resolve("tiny-gpt2").hf_model(torch.float32)
    model.generation_config.max_new_tokens = 17
    labkit.init_inference(model, save_mp_checkpoint_path=str(tmp_path))
    assert resolve(tmp_path).hf_model(torch.float32).generation_config.max_new_tokens == 17
