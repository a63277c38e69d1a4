"""Work of a decode step outside the ops, in Triton's interpreter: the choice of the next tokens."""

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED

from labkit.kernels import gpu
from labkit.kernels.decode_step import triton_kernels
from labkit.kernels.tuned import Tile

SEQUENCES, PROGRAMS, PADDED = 3, 600, 16
pytestmark = INTERPRETED


def next_tokens(best: torch.Tensor, best_rows: torch.Tensor, block: int = 256) -> list[int]:
    """Tokens that `next_step` chooses from each program's best logit and its row."""
    tokens = torch.full((SEQUENCES,), 77)
    positions, past = torch.tensor([4, 0, 190], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    gpu.Launcher()(
        triton_kernels.next_step,
        (1,),
        Tile(1, 1024),
        tokens_ptr=tokens,
        past_ptr=past,
        positions_ptr=positions,
        best_ptr=best,
        where_ptr=best_rows.to(torch.int32),
        programs=len(best),
        M=SEQUENCES,
        CHOOSE=True,
        MB=4,
        MP=PADDED,
        BLOCK=block,
    )
    assert positions.tolist() == [5, 1, 191]
    assert past.tolist() == [7]
    return tokens.tolist()


@pytest.fixture
def best() -> torch.Tensor:
    return torch.randn(PROGRAMS, PADDED, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def best_rows() -> torch.Tensor:
    """Row of each program's best logit; rows of later programs come later."""
    return 8 * torch.arange(PROGRAMS)[:, None] + torch.arange(PADDED) % 8


@pytest.mark.parametrize("block", [256, 1024])
def test_the_largest_of_all_programs_is_chosen(best: torch.Tensor, best_rows: torch.Tensor, block: int) -> None:
    expected = best_rows.gather(0, best.argmax(0, keepdim=True))[0, :SEQUENCES].tolist()
    assert next_tokens(best, best_rows, block) == expected


@pytest.mark.parametrize("programs", [(10, 11, 599), (0, 256, 512), (300, 555, 556)])
def test_of_equal_ones_the_first_is_chosen(
    best: torch.Tensor, best_rows: torch.Tensor, programs: tuple[int, ...]
) -> None:
    best[list(programs)] = 9.0
    assert next_tokens(best, best_rows) == best_rows[programs[0], :SEQUENCES].tolist()


def test_where_no_logit_is_a_number_it_is_minus_one(best: torch.Tensor, best_rows: torch.Tensor) -> None:
    best[:, 1] = -float("inf")
    first, second, third = next_tokens(best, best_rows)
    assert second == -1
    assert min(first, third) >= 0
