"""The copies around a convolution's products of strips put every number in its place.

What they allocate lies in a frame of sevens, so what is left out, or written beside it, shows.
"""

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from dkfac.ops import conv_fused

FRAME = 4096


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(one, other):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


@pytest.fixture
def buffers(monkeypatch):
    """The buffers of sevens in the middle of which ``torch.empty`` now allocates."""
    made = []

    def empty(*shape, dtype, device):
        made.append(torch.full((math.prod(shape) + 2 * FRAME,), 7, dtype=dtype, device=device))
        return made[-1][FRAME:-FRAME].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    return made


def frames_are_intact(buffers):
    return len(buffers) > 0 and all((b[:FRAME] == 7).all() and (b[-FRAME:] == 7).all() for b in buffers)


class Case(NamedTuple):
    """Images, channels, height, width of the input; then as the arguments of ``strips``."""

    shape: tuple[int, int, int, int]
    width: int
    stride: int = 1
    dilation: int = 1
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    room: int = 2


CASES = [
    Case((1, 1, 1, 1), 1, pads=(0, 0, 0, 0), room=0),
    Case((2, 3, 5, 7), 3),
    Case((2, 3, 5, 7), 1, pads=(1, 1, 0, 0)),
    Case((3, 5, 4, 9), 5, stride=2, pads=(2, 0, 1, 3), room=3),
    Case((2, 7, 3, 11), 3, dilation=2, pads=(0, 3, 4, 0), room=1),
    Case((1, 16, 2, 8), 3, stride=2, dilation=2, pads=(1, 1, 2, 1), room=0),
    Case((1, 24, 3, 4), 3, stride=3, pads=(1, 2, 0, 2), room=9),
    Case((2, 64, 3, 3), 3),
    Case((1, 200, 1, 4), 3, room=17),
    Case((0, 3, 4, 4), 3),
    Case((5, 2, 1, 2), 5, dilation=3, pads=(0, 0, 9, 8), room=1),
]


def cut(x, case):
    """Strips, tap by tap."""
    above, below, left, right = case.pads
    padded = F.pad(x, (left, right, above, below))
    wide = (padded.shape[-1] - (case.width - 1) * case.dilation - 1) // case.stride + 1
    columns = torch.arange(wide, device=x.device) * case.stride
    taps = [padded[..., columns + tap * case.dilation].movedim(1, -1) for tap in range(case.width)]
    return torch.cat(taps, dim=-1)


@pytest.mark.parametrize(
    ("dtype", "case"),
    [*product([torch.float32], CASES), *product([torch.bfloat16, torch.float16], CASES[4:5])],
    ids=str,
)
def test_strips_are_the_taps_side_by_side_with_zeros_around_and_behind(dtype, case, buffers):
    x = random(*case.shape, dtype=dtype).to(memory_format=torch.channels_last)
    if x.numel() > 1:
        x[0, 0, 0, :2] = torch.tensor([-0.0, float("inf")])[: case.shape[-1]]
    expected = cut(x, case)
    found = conv_fused.strips(x, *case[1:])
    assert same_bits(found, expected)
    assert found.is_contiguous()
    behind = case.room * math.prod(found.shape[2:])
    assert found.untyped_storage().size() // dtype.itemsize == found.numel() + behind + 2 * FRAME
    room = found.as_strided((behind,), (1,), found.storage_offset() + found.numel())
    assert same_bits(room, torch.zeros_like(room))
    assert frames_are_intact(buffers)


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.contiguous], ids=["float64", "channels-first"])
def test_strips_are_the_same_of_other_types_and_layouts(change):
    case = CASES[3]
    x = change(random(*case.shape).to(memory_format=torch.channels_last))
    assert same_bits(conv_fused.strips(x, *case[1:]), cut(x, case))


def test_a_kernel_wider_than_the_image_is_refused():
    with pytest.raises(AssertionError, match="narrower than the kernel"):
        conv_fused.strips(torch.ones(1, 2, 3, 4), 5, 1, 1, (1, 1, 0, 0), 2)


def put_together(totals, borders, channels):
    """The definition, block by block, then features put in order by an index."""
    features = totals[0].shape[1]
    rows = []
    for one in range(3):
        blocks = [totals[other - one] if other >= one else totals[one - other].mT for other in range(3)]
        if one == 2 and borders[0] is not None:
            blocks[2] = blocks[2] - borders[0]
        if one == 0 and borders[1] is not None:
            blocks[0] = blocks[0] - borders[1]
        rows.append(torch.cat(blocks, dim=2))
    whole = torch.cat(rows, dim=1)
    taps = product(range(channels), range(3), range(features // channels))
    order = torch.tensor([ty * features + tx * channels + c for c, ty, tx in taps], device=whole.device)
    return whole[:, order][:, :, order]


@pytest.mark.parametrize(("parts", "channels", "width"), [(1, 1, 1), (3, 3, 3), (1, 5, 5), (3, 19, 1), (1, 29, 3)])
@pytest.mark.parametrize(("bordered", "ones"), [(True, 1), (False, 0)])
def test_assemble_puts_every_product_in_the_weights_order(parts, channels, width, bordered, ones, buffers):
    features = channels * width
    same, one, two, top, bottom = (random(parts, features, features, seed=i) for i in range(5))
    same = same + same.mT
    borders = (top, bottom) if bordered else (None, None)
    expected = put_together((same, one, two), borders, channels)
    found = conv_fused.assemble((same, one, two), borders, channels, ones)
    assert found.shape == (parts, 3 * features + ones, 3 * features + ones)
    assert same_bits(found[:, : 3 * features, : 3 * features], expected)
    assert (found[:, 3 * features :] == 7).all()
    assert (found[:, :, 3 * features :] == 7).all()
    assert frames_are_intact(buffers)


def test_assemble_takes_slices():
    """As ``factors.product`` returns them of half-precision rows that it had to pad."""
    same, one, two = (random(2, 16, 16, seed=i)[:, :9, :9] for i in range(3))
    found = conv_fused.assemble((same, one, two), (None, None), 3, 0)
    assert same_bits(found, put_together((same, one, two), (None, None), 3))


def gram_of_strips(x, case, parts):
    """The sum over patches, as ``patches_gram`` is to form it."""
    above, below = case.pads[:2]
    channels = x.shape[1]
    cuts = conv_fused.strips(x, *case[1:])
    images, height, width, features = cuts.shape
    length = images // parts * height * width
    steps, start = (length * features, features, 1), cuts.storage_offset()
    views = [cuts.as_strided((parts, length, features), steps, start + i * width * features) for i in range(3)]
    totals = [views[0].mT @ view for view in views]
    borders = (None, None)
    if above == below == 1:
        edges = [cuts[:, row].reshape(parts, -1, features) for row in (1, height - 2)]
        borders = tuple(edge.mT @ edge for edge in edges)
    return conv_fused.assemble(totals, borders, channels, 0)


GRAMS = [
    Case((6, 2, 5, 7), 3),
    Case((3, 2, 1, 4), 3),
    Case((3, 2, 2, 4), 5, stride=2, pads=(1, 1, 2, 1)),
    Case((3, 3, 4, 6), 3, dilation=2, pads=(2, 2, 2, 2)),
    Case((3, 4, 6, 5), 1, pads=(2, 3, 0, 0)),
]


@pytest.mark.parametrize(("case", "parts"), [(GRAMS[0], 3), *((case, 1) for case in GRAMS)], ids=str)
def test_strips_their_products_and_assemble_make_the_sum_over_patches(case, parts):
    """In whole numbers, so that the kernels' float32 is exact too."""
    x = random(*case.shape, dtype=torch.float64).mul(4).round().to(memory_format=torch.channels_last)
    above, below, left, right = case.pads
    padded = F.pad(x, (left, right, above, below))
    patches = F.unfold(padded, (3, case.width), dilation=(1, case.dilation), stride=(1, case.stride))
    patches = patches.mT.reshape(parts, -1, patches.shape[1])
    assert torch.equal(gram_of_strips(x, case, parts).double(), patches.mT @ patches)
