"""The real thing: engines of two processes save and load together, and what they saved serves one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import labkit
from labkit.weights.resolve import resolve

PROMPT = [[5, 77, 300, 12, 9, 41]]
RANK = f"""
import json, sys
import torch
import labkit
import torch.distributed as dist

folder, out = sys.argv[1:]
options = {{"dtype": torch.float32, "impl": "cpp", "tensor_parallel": {{"tp_size": 2}}}}
prompt = torch.tensor({PROMPT})
first = labkit.init_inference(labkit.resolve("tiny-llama"), save_mp_checkpoint_path=folder, **options)
want = first.generate(prompt, max_new_tokens=12, do_sample=False)
again = labkit.init_inference(labkit.resolve(folder), **options)
assert torch.equal(again(prompt).logits, first(prompt).logits)
assert torch.equal(again.generate(prompt, max_new_tokens=12, do_sample=False), want)
try:
    labkit.init_inference(labkit.resolve(folder), save_mp_checkpoint_path=folder, **options)
except ValueError as error:
    assert "holds a checkpoint already" in str(error)
if dist.get_rank() == 0:
    open(out, "w").write(json.dumps(want.tolist()))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
def test_two_processes_save_and_load_and_one_continues_with_the_same_tokens(tmp_path: Path) -> None:
    script, folder, out = tmp_path / "rank.py", tmp_path / "saved", tmp_path / "tokens.json"
    script.write_text(RANK)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, script, folder, out],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "labkit_checkpoint.json",
        "rank-00-of-02.safetensors",
        "rank-01-of-02.safetensors",
    ]
    want = torch.tensor(json.loads(out.read_text()))
    for engine in (
        labkit.init_inference(resolve(folder)),
        labkit.init_inference(resolve("tiny-llama"), checkpoint=str(folder)),
        labkit.init_inference(resolve("tiny-llama"), dtype=torch.float32),
    ):
        assert torch.equal(engine.generate(torch.tensor(PROMPT), max_new_tokens=12, do_sample=False), want)


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
