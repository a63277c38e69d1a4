"""On a machine without Triton (it exists for Linux only) everything else works."""

import os
import subprocess
import sys

from helpers.sweeps import sweep

PROGRAM = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch
import labkit, labkit.cli.main, labkit.harness, labkit.widgets, labkit.figures, labkit.notebooks
from labkit.kernels import gpu
source = labkit.resolve("tiny-gpt2")
engine = labkit.init_inference(source, dtype=torch.float32)
print(engine.impl, engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape[1])
gpu.find_spec = lambda name: None
try:
    labkit.init_inference(source, dtype=torch.float32, impl="triton")
except ValueError as error:
    print(error)
"""


@sweep
def test_the_engine_runs_and_says_what_is_missing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False
    )
    assert process.returncode == 0, process.stderr
    result, message = process.stdout.splitlines()
    assert result in ("cpp 5", "reference 5")
    assert message.startswith("impl 'triton' needs the package triton, which is not installed: pip install triton")
