"""Adam's moments of rows and columns, and the length of its update, as Triton kernels."""

import pytest
import torch
from helpers_kernels import assert_passes_interpreted
from test_tile_products import INTERPRETED, every_device, needs_triton

from dkfac.ops import adam_length_kernels as adam
from dkfac.ops.kernels import launch_kernel
from dkfac.ops.many import on_device


@every_device
@pytest.mark.parametrize("good", [True, False])
def test_moments_and_length(device, good):
    rows, columns, keep, keep_square, eps, most = 600, 301, 0.9, 0.99, 1e-4, 1.5
    generator = torch.Generator().manual_seed(0)
    g, m = torch.randn(2, rows, columns, generator=generator).to(device)
    down, across = torch.rand(rows, generator=generator).to(device), torch.rand(columns, generator=generator).to(device)
    old, flag = [t.clone() for t in (m, down, across)], torch.tensor(good, device=device)
    if not good:
        g[3, 3] = torch.nan
    grid = [-(-n // size) for n, size in zip((rows, columns), adam.PER_TILE.values(), strict=True)]
    work, row_sums = torch.zeros(1 + rows * columns, device=device), torch.zeros(1 + grid[1] * rows, device=device)
    column_sums, totals = torch.zeros(2 + grid[0] * columns, device=device), torch.zeros(1, device=device)
    addresses = [t.data_ptr() for t in (g, m, down, across)]
    where = torch.device(device)
    pieces = on_device([[*addresses, rows, columns, 1, 2, grid[1], grid[0], 0, 4, *[0] * 4]], where)
    tiles = [[0, i, j] for i in range(grid[0]) for j in range(grid[1])]
    block = adam.PER_SEGMENT["BLOCK"]
    segments = [[0, side, n] for side, size in enumerate((rows, columns)) for n in range(-(-size // block))]
    count, tiles = len(tiles), on_device(tiles, where, torch.int32)
    options = {"ALIGNED": 0, **adam.PER_TILE}
    launch_kernel(adam.sides_kernel, count, pieces, tiles, work, flag, row_sums, column_sums, keep, **options)
    given = pieces, on_device(segments, where, torch.int32), flag, row_sums, column_sums, keep_square
    launch_kernel(adam.collect_kernel, len(segments), *given, **adam.PER_SEGMENT)
    launch_kernel(adam.row_totals_kernel, 1, pieces, totals, BLOCK=128)
    assert torch.equal(work[1:].view(rows, columns), old[0])
    expected = [t * keep + new if good else t for t, new in ((old[0], g),)]
    expected += [t * keep_square + g.square().sum(i) if good else t for t, i in ((old[1], 1), (old[2], 0))]
    for found, wanted in zip((m, down, across), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(totals[0], down.sum())

    mean_weight, square_weight = torch.tensor([3.0, 5.0], device=device)
    values, lengths = torch.full((8,), most, device=device), torch.zeros(count, device=device)
    layers = on_device([[*[0] * 6, mean_weight.data_ptr(), square_weight.data_ptr(), *[0] * 8]], where)
    launch_kernel(adam.length_kernel, count, pieces, tiles, layers, values, totals, lengths, eps, **options)
    second = (down / down.sum() / square_weight).sqrt()[:, None] * across.sqrt() + eps
    update = (m / mean_weight / second).clamp(-most, most)
    torch.testing.assert_close(lengths.sum(), update.square().sum(), rtol=1e-4, atol=0)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")
