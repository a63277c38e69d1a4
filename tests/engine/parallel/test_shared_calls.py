"""A failure on one rank fails on all ranks with its reason, and the next call works."""

import pytest
from failing_ranks import KINDS, check_told, told
from sweeps import sweep

import labkit

pytestmark = pytest.mark.timeout(300)


@sweep
@pytest.mark.parametrize(
    ("pp_size", "tp_size", "kinds"),
    [
        pytest.param(1, 2, tuple(KINDS), id="two ranks"),
        pytest.param(2, 1, tuple(KINDS), id="two stages"),
        pytest.param(2, 2, ("shared memory",), id="two stages of two ranks"),
        pytest.param(3, 1, tuple(KINDS), id="three stages"),
        pytest.param(1, 3, tuple(KINDS), id="three ranks"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(pp_size: int, tp_size: int, kinds: tuple[str, ...]) -> None:
    check_told(labkit.launch(told, pp_size, tp_size, kinds, pp_size=pp_size, tp_size=tp_size, timeout_s=240))
