"""Modules on packed matrices compute what the originals compute, for any order of their calls."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.engine.injected.modules import InjectedEmbedding, InjectedLinear, JoinedLinear, JoinedLinears, multiplied
from labkit.kernels.gemm import packed
from labkit.kernels.types import Linear

OUTPUTS = (40, 8, 24)


def weight(outputs: int, inputs: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def matrix(rows: Tensor) -> Linear:
    return packed(Linear(rows, None, len(rows), rows.shape[1], "rows"))


def joined() -> tuple[list[JoinedLinear], list[Tensor]]:
    """Linears that read one tensor, and their weights."""
    parts = list(weight(sum(OUTPUTS)).split(OUTPUTS))
    shared = JoinedLinears(matrix(torch.cat(parts)), OUTPUTS)
    return [JoinedLinear(shared, at, size, torch.float32, bias=False) for at, size in enumerate(OUTPUTS)], parts


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2, 2), (0,), (2, 2, 2)])
def test_joined_linears_are_right_in_any_order(order: tuple[int, ...]) -> None:
    linears, weights = joined()
    x, other = weight(6, seed=1), weight(6, seed=2)
    for at in order:
        assert same(linears[at](x), functional.linear(x, weights[at]))
        assert same(linears[at](other), functional.linear(other, weights[at]))


def test_a_tensor_that_changed_between_two_calls_is_read_again() -> None:
    linears, weights = joined()
    x = weight(6, seed=1)
    linears[0](x)
    x.mul_(3)
    assert same(linears[1](x), functional.linear(x, weights[1]))


def test_two_threads_do_not_take_each_others_parts() -> None:
    linears, weights = joined()
    wrong: list[int] = []

    def run(seed: int) -> None:
        for turn in range(200):
            x = weight(3, seed=1000 * seed + turn)
            wrong.extend(
                at for at, linear in enumerate(linears) if not same(linear(x), functional.linear(x, weights[at]))
            )

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_rows_give_no_rows() -> None:
    assert multiplied(torch.empty(2, 0, 48), matrix(weight(8))).shape == (2, 0, 8)


def test_rows_of_any_shape_and_type_are_taken() -> None:
    linear = InjectedLinear(matrix(weight(40)), torch.bfloat16)
    x = weight(12, seed=1).view(2, 2, 3, 48).transpose(0, 1).bfloat16()
    y = linear(x)
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, 2, 3, 40))
    assert torch.allclose(y.float(), functional.linear(x.float(), weight(40)), rtol=0.02, atol=0.1)


def test_weights_are_seen_but_not_computed_with() -> None:
    linear = InjectedLinear(matrix(weight(40)), torch.float32)
    assert (linear.weight.shape, linear.weight.dtype, linear.in_features) == ((40, 48), torch.float32, 48)
    for compute in (
        lambda stored: functional.linear(weight(3), stored),
        lambda stored: weight(3) @ stored.T,
        lambda stored: stored + 1,
        lambda stored: stored.clone(),
        lambda stored: functional.embedding(torch.tensor([1]), stored),
    ):
        with pytest.raises(ValueError, match="the weight is packed"):
            compute(linear.weight)
    assert repr(linear.weight) == "PackedWeight([40, 48], torch.float32)"
    with pytest.raises(ValueError, match=r"the weights are packed in torch\.float32"):
        nn.Sequential(linear).half()


def test_an_embedding_reads_the_rows_of_the_heads_matrix() -> None:
    rows, tokens = weight(40), torch.tensor([[3, 0], [39, 3]])
    assert same(InjectedEmbedding(matrix(rows), 2.0, torch.float32)(tokens), 2 * rows[tokens])
