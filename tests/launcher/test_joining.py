"""A rank that fails before it joins the others tells them so, and all ranks can join in the next call."""

import pytest
from helpers.sweeps import sweep

import labkit


@pytest.mark.timeout(120)
def test_who_fails_before_joining_is_heard_at_once_and_the_next_call_joins() -> None:
    def calls() -> list[str]:
        import time

        import torch.distributed as dist

        from labkit.launcher.joining import join, joining

        rank, messages = dist.get_rank(), []
        for failing in ([1], [0, 1], [0], []):
            dist.barrier()
            start = time.monotonic()
            try:
                with joining(None):
                    if rank in failing:
                        raise OSError(f"no file on {rank}")
                    messages.append(" ".join(join(f"rank {rank}", None)))
            except (OSError, RuntimeError) as error:
                messages.append(str(error))
            assert time.monotonic() - start < 30
        return messages

    first, second = labkit.launch(calls, tp_size=2, timeout_s=90)
    assert first == ["rank 1: OSError: no file on 1", "no file on 0", "no file on 0", "rank 0 rank 1"]
    assert second == ["no file on 1", "no file on 1", "rank 0: OSError: no file on 0", "rank 0 rank 1"]


@sweep
@pytest.mark.timeout(120)
def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    def wait() -> str:
        import json
        import subprocess

        import torch.distributed as dist

        from labkit.kernels.other_ranks import LostRankError
        from labkit.kernels.shared_memory import system
        from labkit.launcher.joining import PROCESS, join

        dist.barrier()
        message = ""
        if dist.get_rank() == 0:  # a process that has ended takes the place of rank 1
            with subprocess.Popen(["true"]) as ended_process:
                pass
            store = dist.distributed_c10d._get_default_store()
            store.set(PROCESS.format(1), json.dumps([*system(), ended_process.pid]))
            with pytest.raises(LostRankError) as lost:
                join("here", None)
            message = str(lost.value)
        dist.barrier()
        return message

    message, _ = labkit.launch(wait, tp_size=2, timeout_s=90)
    assert "rank 0: rank 1 has ended" in message
