"""Widths that are decomposed in one batch."""

import pytest
import torch

from dkfac.decompose.replace import concatenated
from dkfac.ops import together
from dkfac.ops.decompose import Eigen, warm_step, warm_steps


def job(number, width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(number, 3 * width, width, generator=generator, dtype=torch.float64)
    factor = rows.mT @ rows / len(rows[0])
    values, vectors = torch.linalg.eigh(factor + 0.1 * torch.eye(width, dtype=torch.float64))
    return factor, Eigen(vectors, values), factor.new_zeros(number)


@pytest.mark.parametrize(("most", "sizes"), [(0.0, {64, 30, 8}), (1e6, {64, 30}), (1e9, {64})])
def test_widths_with_few_blocks_are_padded_to_the_next_larger_one(most, sizes, monkeypatch):
    monkeypatch.setitem(together.ANOTHER_BATCH, "cpu", most)
    widths = []

    def noted(factors, olds):
        widths.extend(factor.shape[-1] for factor in factors)
        return warm_steps(factors, olds)

    monkeypatch.setattr(together, "warm_steps", noted)
    jobs = [job(3, 8), job(5, 64), job(40, 30), job(1, 62)]
    renewed = together.renewed(jobs)
    assert sorted(widths) == sorted(sizes), "one batch of each"
    for (factor, old, _), (found, sound) in zip(jobs, renewed, strict=True):
        assert sound.all()
        expected = warm_step(factor, old)
        overlap = (found.vectors.mT @ expected.vectors).diagonal(dim1=-2, dim2=-1).abs()
        torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-8, atol=1e-10)


def test_parts_of_one_tensor_in_order_are_concatenated_without_a_copy():
    whole = torch.arange(60.0).view(5, 3, 4)
    one, two, three = whole.split([2, 2, 1])
    assert concatenated([one, two, three]).data_ptr() == whole.data_ptr()
    assert torch.equal(concatenated([one, two, three]), whole)
    for parts in ([two, one], [one, three], [one, two.clone()], [one.mT, two.mT], [three.mT]):
        assert torch.equal(concatenated(parts), torch.cat(parts))
