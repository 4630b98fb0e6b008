"""Factors in pieces (``block_dim``): networks that are cut in every way, and ``kfac.factors()`` as whole matrices."""

import reference as ref
import torch
from helpers_exact import Conv1D
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC


def linears():
    """At 8: divisors and a rest on either side, with and without bias, and layers of which a part or nothing is cut."""
    return nn.Sequential(
        nn.Linear(20, 17),
        nn.Tanh(),
        nn.Linear(17, 16, bias=False),
        nn.Tanh(),
        nn.Linear(16, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def convolutions():
    """3x3 with stride 1 and 2, and 1x1; at 30 the second has 4 x 2 channels, the third 3, 3 and 1."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 7, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(7, 10, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(10, 20, 1),
        nn.Tanh(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def grouped():
    """At 8: two groups with pieces of 4 and a rest in G, without bias, and six groups whose 9 taps are taken apart."""
    return nn.Sequential(
        nn.Conv2d(6, 6, 3, groups=6, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 26, 2, groups=2),
        nn.Tanh(),
        nn.Conv2d(26, 10, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(10, 3),
    )


def sequences():
    """Conv1d; at 8 the last has, in each of two groups, pieces of 3 and 2 channels of 2 taps."""
    return nn.Sequential(
        nn.Conv1d(4, 12, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(12, 10, 3, stride=2, groups=2),
        nn.Tanh(),
        nn.Conv1d(10, 26, 2, groups=2),
        nn.Tanh(),
        nn.AvgPool1d(3),
        nn.Flatten(),
        nn.Linear(26, 3),
    )


def tokens():
    """An embedding, of which only G is cut, a norm layer, which is not, and transformers' Conv1D."""
    return nn.Sequential(
        nn.Embedding(40, 20, padding_idx=0), nn.LayerNorm(20), Conv1D(17, 20), nn.Tanh(), nn.Linear(17, 12)
    )


def edge():
    """At 8 the bias alone makes the A of the first two wider than 8; the last is as wide as that with its bias."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))


NETS = {
    "linears": (linears, (20,)),
    "convolutions": (convolutions, (3, 5, 5)),
    "grouped": (grouped, (6, 4, 4)),
    "sequences": (sequences, (4, 9)),
    "tokens": (tokens, (4,)),
    "edge": (edge, (8,)),
}


def build(net):
    torch.manual_seed(0)
    model = NETS[net][0]().double()
    with torch.no_grad():
        for module in model:
            if isinstance(module, Conv1D | nn.Embedding):
                module.weight *= 0.3
    return model


def batch(step, net):
    """Return inputs and targets of a squared error, or of a cross-entropy over the tokens.

    There are more examples than any factor but that of a convolution is wide: without full rank bases are arbitrary.
    """
    generator, shape = torch.Generator().manual_seed(step), NETS[net][1]
    size = 32 if net == "sequences" else 24
    if net == "tokens":
        return tuple(torch.randint(0, most, (size, *shape), generator=generator) for most in (40, 12))
    outputs = 8 if net == "edge" else 3
    x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, outputs, generator=generator, dtype=torch.float64)


def attach(model, optimizer, block_dim, **options):
    return KFAC(model, optimizer, **arranged(options | {"block_dim": block_dim}))


def shape_of(module):
    """Return groups, and the dimensions of A and G, a folded bias included."""
    groups = getattr(module, "groups", 1)
    widths = ref.layer_pieces(module, None)
    return groups, widths["A"][0], widths["G"][0]


def in_pieces(module, whole, block_dim):
    """Return what ``kfac.factors()`` has for a layer with ``block_dim``, from what it has without.

    Pieces of one width are ``[groups * pieces, w, w]``, those of a group together; a narrower one is under a key of its
    own; a dimension of one block is squeezed; the piece of the bias is not there.
    """
    if isinstance(module, ref.NORMS):
        return whole
    groups, widths, result = shape_of(module)[0], ref.layer_pieces(module, block_dim), {}
    for key in ("A", "G"):
        places = ref.piece_slices(widths[key])
        if len(places) == 1:
            result[key] = whole[key]
            continue
        if key == "A" and ref.folds_bias(module):
            places.pop()
        matrix = whole[key].reshape(groups, sum(widths[key]), -1)
        blocks = [[matrix[b, here, here] for here in places] for b in range(groups)]
        wide = [block for own in blocks for block in own if len(block) == len(own[0])]
        rest = [block for own in blocks for block in own if len(block) < len(own[0])]
        for name, found in ((key, wide), (f"{key}_rest", rest)):
            if found:
                result[name] = torch.stack(found) if len(found) > 1 else found[0]
    return result


def whole_matrices(module, found, block_dim):
    """Return ``{"A": [B, D, D], "G": ...}`` with zeros between pieces, from a layer's entry of ``kfac.factors()``."""
    if isinstance(module, ref.NORMS):
        value = found["F"]
        return {"F": value.clone() if value.ndim == 3 else value.unsqueeze(0).clone()}
    groups, widths, result = shape_of(module)[0], ref.layer_pieces(module, block_dim), {}
    assert set(found) <= {"A", "G", "A_rest", "G_rest"}
    for key in ("A", "G"):
        value, places = found[key], ref.piece_slices(widths[key])
        if len(places) == 1:
            value = torch.diag_embed(value) if isinstance(module, nn.Embedding) and key == "A" else value
            result[key] = value.reshape(groups, widths[key][0], widths[key][0]).clone()
            continue
        matrix = value.new_zeros(groups, sum(widths[key]), sum(widths[key]))
        if key == "A" and ref.folds_bias(module):
            places.pop()
            matrix[:, -1, -1] = 1.0
        first = places[0].stop
        by_width = {first: iter(value.reshape(-1, first, first))}
        if f"{key}_rest" in found:
            rest = widths[key][len(places) - 1]
            by_width[rest] = iter(found[f"{key}_rest"].reshape(-1, rest, rest))
        for b in range(groups):
            for here in places:
                matrix[b, here, here] = next(by_width[here.stop - here.start])
        assert all(next(blocks, None) is None for blocks in by_width.values()), "more blocks than pieces"
        result[key] = matrix
    return result
