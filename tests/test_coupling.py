"""Pool and lift against their definitions, token by token."""

import pytest
import torch

from odeformer.coupling import lift, pool

SIZES = [(1, 1), (1, 5), (3, 2), (3, 3), (3, 10), (7, 20), (16, 15), (16, 50), (49, 101)]


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_pool_is_the_mean_of_each_complete_block(size: int, length: int) -> None:
    x = torch.randn(2, length, 4, dtype=torch.float64)
    pooled = pool(x, size)
    assert pooled.shape == (2, length // size, 4)
    for j in range(length // size):
        torch.testing.assert_close(pooled[:, j], x[:, j * size : (j + 1) * size].mean(1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_lift_reads_the_last_block_that_ended(size: int, length: int) -> None:
    v = torch.randn(2, length // size, 4, dtype=torch.float64)
    lifted = lift(v, length, size)
    assert lifted.shape == (2, length, 4)
    for t in range(length):
        ended = [j for j in range(length // size) if j * size + size - 1 <= t]
        expected = v[:, ended[-1]] if ended else torch.zeros(2, 4, dtype=torch.float64)
        assert torch.equal(lifted[:, t], expected)


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_a_lifted_pool_depends_on_the_past_alone(size: int, length: int) -> None:
    x = torch.randn(1, length, 1, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: lift(pool(z, size), length, size), x)[0, :, 0, 0, :, 0]
    assert torch.equal(jacobian, jacobian.tril())
    assert size > length or jacobian.abs().sum() > 0


def test_a_channel_factor_commutes_with_lift_bit_for_bit() -> None:
    v, gamma = torch.randn(2, 3, 4), torch.randn(4)
    assert torch.equal(gamma * lift(v, 11, 3), lift(gamma * v, 11, 3))


def test_without_separation_each_block_sits_on_its_token() -> None:
    x = torch.randn(2, 6, 4)
    assert torch.equal(pool(x, 1), x)
    assert torch.equal(lift(x, 6, 1), x)


def test_lift_refuses_a_wrong_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="needs 3 blocks, got 2"):
        lift(torch.zeros(1, 2, 4), 10, 3)
