"""Rounding up, and the block of a matrix, to which rows are rounded. The kernels have the same in `rounding.h`."""

BLOCK = 32  # rows of a block of a packed matrix


def ceil_div(count: int, size: int) -> int:
    """Returns the number of pieces of `size` that hold `count`."""
    return -(-count // size)


def round_up(count: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is no smaller than `count`."""
    return ceil_div(count, multiple) * multiple
