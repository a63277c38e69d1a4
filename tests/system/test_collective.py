"""Work of all ranks: each has all results, and an error of one rank is raised on all."""

from collections.abc import Callable

import pytest

from labkit.system.collective import alone, own_result, results_of_ranks
from labkit.system.errors import RunError, UserError


def fails(error: Exception) -> Callable[[], str]:
    def work() -> str:
        raise error

    return work


def test_a_single_process_has_its_own_result() -> None:
    results = results_of_ranks(lambda: "one", alone)
    assert (results, own_result(lambda: "one", alone)) == (["one"], "one")


def test_results_are_in_the_order_of_the_ranks() -> None:
    def gather(own: object) -> list[object]:
        return [own, ("two", None, False)]

    assert results_of_ranks(lambda: "one", gather) == ["one", "two"]


def test_an_error_of_another_rank_is_raised_here() -> None:
    def gather(own: object) -> list[object]:
        return [own, (None, "no room", False)]

    with pytest.raises(RunError, match=r"^no room$"):
        own_result(lambda: "one", gather)
    with pytest.raises(RunError, match=r"^not saved: no room$"):
        results_of_ranks(lambda: "one", gather, "not saved")


@pytest.mark.parametrize(("error", "raised"), [(OSError("disk"), RunError), (ValueError("argument"), UserError)])
def test_an_error_of_this_rank_is_told_to_the_other_ranks(error: Exception, raised: type[Exception]) -> None:
    posted: list[object] = []

    def gather(own: object) -> list[object]:
        posted.append(own)
        return [own]

    with pytest.raises(raised, match=str(error)):
        own_result(fails(error), gather)
    assert posted == [(None, str(error), isinstance(error, ValueError))]


def test_a_defect_keeps_its_type() -> None:
    with pytest.raises(KeyError):
        own_result(fails(KeyError("name")), alone)
