"""What fails on one rank fails on all, with its reason, and the next call begins anew."""

import re

import pytest
from failing_ranks import KINDS, told
from sweeps import sweep

import labkit

pytestmark = pytest.mark.timeout(300)
REASONS = {
    "argument": "ValueError: ",
    "prompt": "TooMuchError: a prompt of two lines",
    "step": "TooMuchError: a step",
    "Ctrl-C": "KeyboardInterrupt",
    "end": "TooMuchError: the end",
    "forward": "TooMuchError: a step",
    "load": "MemoryError",
}


@pytest.mark.parametrize(
    ("pp_size", "tp_size", "kinds"),
    [
        pytest.param(1, 2, tuple(KINDS), id="two ranks"),
        pytest.param(2, 1, tuple(KINDS), id="two stages"),
        pytest.param(2, 2, ("shared memory",), id="two stages of two ranks", marks=sweep),
        pytest.param(3, 1, tuple(KINDS), id="three stages", marks=sweep),
        pytest.param(1, 3, tuple(KINDS), id="three ranks", marks=sweep),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(pp_size: int, tp_size: int, kinds: tuple[str, ...]) -> None:
    ranks = labkit.launch(told, pp_size, tp_size, kinds, pp_size=pp_size, tp_size=tp_size, timeout_s=240)
    for rank, by_kind in enumerate(ranks):
        for kind, said in by_kind.items():
            assert said.pop("afterwards") == "True", kind
            assert re.search("RanksDifferError: the ranks make different calls: forward, .*generate", said.pop("calls"))
            for what, message in said.items():
                way, _, which = what.partition(" on ")
                own = rank == int(which)
                wanted = REASONS[way] if own else f"RankFailedError: rank {which}: {REASONS[way]}"
                assert message.replace("\n", " ").startswith(wanted), f"{kind}, {what}, on rank {rank}: {message}"
    assert all(len(said) == len(REASONS) * pp_size * tp_size for by_kind in ranks for said in by_kind.values())
