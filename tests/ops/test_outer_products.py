"""Products of rows with themselves: by strips, by blocks, in the weight's order."""

import pytest
import torch

from dkfac.ops.factors import gram, in_weight_order

torch_double = {"dtype": torch.float64}


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("shape", [(300, 1, 1, 256), (700, 1, 1, 301), (5, 4, 1, 300), (9, 3, 4, 7), (1, 1, 1, 1)])
def test_a_gram_is_the_product_of_the_rows_with_themselves_whatever_strips_it_is_made_of(shape, ones, scale):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), **torch_double)
    flat = rows.flatten(0, 1).movedim(1, 0)
    if ones:
        flat = torch.cat([flat, torch.ones(*flat.shape[:2], 1, **torch_double)], dim=2)
    found = gram(rows, ones=ones, scale=scale, dtype=torch.float64)
    torch.testing.assert_close(found, scale * flat.mT @ flat, rtol=1e-12, atol=1e-12)
    if shape[2] == 1:
        off = found - found.mT
        assert float(off.abs().amax()) <= 1e-12 * float(found.abs().amax())


@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize(("taps", "channels"), [(1, 4), (9, 1), (9, 3), (2, 5), (27, 2)])
def test_a_factor_by_tap_and_channel_is_put_in_the_order_of_channel_and_tap(taps, channels, ones):
    features = taps * channels
    rows = torch.randn(11, 1, 2, features, generator=torch.Generator().manual_seed(0), **torch_double)
    by_channel = rows.view(11, 1, 2, taps, channels).transpose(-1, -2).reshape(11, 1, 2, features)
    found = in_weight_order(gram(rows, ones=ones, dtype=torch.float64), taps)
    torch.testing.assert_close(found, gram(by_channel, ones=ones, dtype=torch.float64), rtol=1e-12, atol=1e-12)
