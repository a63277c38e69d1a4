"""One run on two machines, with `labkit launch` on each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes.two_machines import Machine, missing, two_machines
from helpers.sweeps import sweep, swept

LABKIT = (sys.executable, "-P", "-c", "from labkit.cli.main import main; main()")
REASON = missing()
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
SCRIPT = """
import labkit, os, socket, sys, torch, torch.distributed as dist
from labkit.launcher.agreement import check_agreement, versions
from labkit.launcher.group import ensure_process_group
ensure_process_group(tp_size=4)
check_agreement(versions())
rank = dist.get_rank()
total = torch.tensor([2.0**rank])
dist.all_reduce(total)
os.write(1, f"{socket.gethostname()} {rank} {total.item():g}\\n".encode())
try:
    check_agreement({"host": socket.gethostname()})
except ValueError as error:
    os.write(1, f"{error}\\n".encode())
source = labkit.resolve("tiny-llama")
ids = source.tokenizer("Two machines, one model", return_tensors="pt").input_ids
cut = labkit.init_inference(source, tensor_parallel={"tp_size": 4})
tokens = cut.generate(ids, max_new_tokens=4, do_sample=False)
same = torch.equal(tokens, labkit.init_inference(source).generate(ids, max_new_tokens=4, do_sample=False))
os.write(1, f"{cut.module.runner.layer_range.ranks.exchange.transport} {same}\\n".encode())
if rank == dist.get_world_size() - 1 and "fail" in sys.argv:
    raise KeyError("layer.7")
dist.barrier()
"""

pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(150)]


def numbered(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


PIPELINE = """
import labkit, os, torch
source = labkit.resolve("tiny-llama")
ids = torch.tensor([[5, 77, 300, 12], [9, 41, 7, 7], [1, 2, 3, 4]])
stages = labkit.init_inference(source, pipeline_parallel={"pp_size": 2})
tokens = stages.generate(ids, max_new_tokens=6, do_sample=False)
same = torch.equal(tokens, labkit.init_inference(source).generate(ids, max_new_tokens=6, do_sample=False))
os.write(1, f"stage {stages.pipeline.number} {stages.pipeline.ring.transport} {same}\\n".encode())
torch.distributed.barrier()
"""


STOPPED = (
    PIPELINE.partition("tokens =")[0]
    + """
import signal, sys
if stages.pipeline.number == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
stages.generate(ids, max_new_tokens=6, do_sample=False)
"""
)


def start(
    machine: Machine, node: int | None, script: Path, *arguments: str, ranks: int = 4, size: str = "--tp"
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    options = ["--nodes", "2", "--rendezvous", "10.77.0.1:29500"]
    if node is not None:
        options += ["--node-rank", str(node)]
    return subprocess.Popen(
        [*machine.prefix, *LABKIT, "launch", size, str(ranks), *options, "--", str(script), *arguments],
        env=environment | {"TMPDIR": str(script.parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@sweep
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_two_machines_run_one_model_and_fail_together(tmp_path: Path, ranks: int) -> None:
    """Ranks follow the node rank, in whatever order the machines start."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("tp_size=4", f"tp_size={ranks}").replace('"tp_size": 4', f'"tp_size": {ranks}'))
    of_first, of_second = list(range(ranks // 2)), list(range(ranks // 2, ranks))
    with two_machines() as (first, second):
        second_run = start(second, 1, script, "fail", ranks=ranks)
        first_run = start(first, 0, script, "fail", ranks=ranks)
        output, errors = first_run.communicate(timeout=120)
        second_output, second_errors = second_run.communicate(timeout=60)
    disagreement = (
        f'the ranks do not agree on what they run: host is "{first.name}" on {numbered(of_first)} and "{second.name}" '
        f"on {numbered(of_second)}. Start every rank with the same model, options and versions"
    )
    for printed, machine, own_ranks in ((output, first, of_first), (second_output, second, of_second)):
        expected = [["gloo True", disagreement, f"{machine.name} {rank} {2**ranks - 1}"] for rank in own_ranks]
        assert sorted(printed.splitlines()) == sorted(line for lines in expected for line in lines)
    assert (first_run.returncode, second_run.returncode) == (1, 1)
    for message in (errors, second_errors):  # the machine of the failed rank has told the other one
        assert f"error: rank {ranks - 1} failed on {second.name}" in message
        assert message.rstrip().endswith("KeyError: 'layer.7'")
    assert [path.name for path in tmp_path.iterdir() if "inductor" not in path.name] == ["script.py"]


@sweep
def test_machines_without_node_ranks_meet_by_c10d(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.partition("try:")[0].replace("tp_size=4", "tp_size=2"))
    with two_machines() as (first, second):
        runs = [start(first, None, script, ranks=2), start(second, None, script, ranks=2)]
        outputs = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [{line.split()[0] for line in lines} for lines in outputs] == [{first.name}, {second.name}]
    assert sorted(line.split(maxsplit=1)[1] for lines in outputs for line in lines) == ["0 3", "1 3"]


@sweep
def test_stages_on_two_machines_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PIPELINE)
    with two_machines() as machines:
        runs = [start(machine, node, script, ranks=2, size="--pp") for node, machine in enumerate(machines)]
        outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert [printed.splitlines() for printed, _ in outputs] == [[f"stage {stage} gloo True"] for stage in (0, 1)]


@sweep
@pytest.mark.parametrize("stopped", swept([0, 1], ["1"]))
def test_a_rank_that_is_stopped_ends_the_run_on_both_machines_with_one_cause(tmp_path: Path, stopped: int) -> None:
    """All ranks of its machine have stopped then, but not all ranks of the run."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    with two_machines() as machines:
        runs = [
            start(machine, node, script, str(stopped), ranks=2, size="--pp") for node, machine in enumerate(machines)
        ]
        last = [run.communicate(timeout=100)[1].rstrip().splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    assert last[0] == last[1]
    assert re.fullmatch(
        rf"error: rank {stopped} failed on {machines[stopped].name}: "
        r"its process, \d+, is stopped, and the other ranks .*",
        last[0],
    )
