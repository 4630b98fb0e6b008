"""Inverses by halves are as good as those of one Cholesky decomposition."""

import pytest
import torch

from dkfac.ops.decompose import inverse_by_blocks


def factor(dim: int, mean: float, seed: int = 0) -> torch.Tensor:
    """Products of rectified inputs with a mean, as deep layers see them: one eigenvalue is far above the others."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2 * dim, 32, generator=generator, dtype=torch.float64)
    mixed = hidden @ torch.randn(32, dim, generator=generator, dtype=torch.float64) * 0.1
    rows = torch.relu(mixed + mean)
    return rows.mT @ rows / len(rows)


def damped(dim: int, mean: float, share: float, seed: int = 0) -> torch.Tensor:
    found = factor(dim, mean, seed)
    return found + share * found.diagonal().mean() * torch.eye(dim, dtype=found.dtype)


@pytest.mark.parametrize("dim", [1, 5, 256, 257, 512, 700, 1025, 1300])
def test_in_float64_they_are_the_inverses(dim):
    matrices = torch.stack([damped(dim, 1.0, 1e-3, seed) for seed in (0, 1)])
    found, sound = inverse_by_blocks(matrices)
    assert sound.tolist() == [True, True]
    expected = torch.linalg.inv(matrices)
    assert (found - expected).norm() <= 1e-9 * expected.norm()
    assert torch.allclose(found, found.mT, rtol=1e-9)


@pytest.mark.parametrize("share", [3e-2, 1e-3])
@pytest.mark.parametrize("mean", [0.5, 10.0])
@pytest.mark.parametrize("dim", [600, 1100])
def test_in_float32_they_lose_no_more_than_cholesky_does(dim, mean, share):
    matrix = damped(dim, mean, share)
    single = matrix.float()
    (found,), sound = inverse_by_blocks(single.unsqueeze(0))
    assert sound.all()
    theirs = torch.cholesky_inverse(torch.linalg.cholesky(single))
    gradient = matrix[:, :64] + 0.01 * torch.randn(dim, 64, generator=torch.Generator().manual_seed(9)).double()
    exact = torch.linalg.solve(matrix, gradient)

    def error(inverse):
        return (inverse.double() @ gradient - exact).norm() / exact.norm()

    assert error(found) <= 3 * error(theirs) + 1e-6


@pytest.mark.parametrize("dim", [40, 700])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_positive_is_not_trusted_and_spoils_no_other(dim, place):
    matrices = torch.stack([damped(dim, 1.0, 1e-2, seed) for seed in (0, 1, 2)])
    matrices[1, place, place] = -1.0
    matrices[2, place, place] = torch.nan
    found, sound = inverse_by_blocks(matrices)
    assert sound.tolist() == [True, False, False]
    assert (found[0] - torch.linalg.inv(matrices[0])).norm() <= 1e-9 * found[0].norm()
