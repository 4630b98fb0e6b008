"""What travels in fewer bits: the error is the rounding's, ranks stay bitwise equal, triangles are exact.

With u the unit roundoff of the wire's dtype, a factor is the sum over P ranks of sums that are rounded once when they
leave, and once more when the sum is passed on. In half precision nothing is added up: additions are in float32. In
float32, each addition rounds too: at most P + 1 roundings. So each entry is off by at most gamma = (1 + u)^n - 1 times
the sum of the ranks' absolute values, with n = 2 or P + 1. float16 has, besides, a smallest number 2^-24: half of it
per rounding, in units of the agreed scale, which is at most 1/16 of the trace.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import layer_states
from helpers_ranks import on_threads
from helpers_training import SHARE, assert_ranks_are_bitwise_equal, attach, average_gradients, batch, build, weights

from dkfac.ops.pack import pack_triangle, unpack_triangle

WORLD = 3
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DAMPING = 0.1


def roundings(wire_dtype):
    return WORLD + 1 if wire_dtype == "float32" else 2


def gamma(wire_dtype):
    additions = (1 + UNIT["float32"]) ** WORLD  # of half precision, in float32
    return (1 + UNIT[wire_dtype]) ** roundings(wire_dtype) * additions - 1 + 1e-12  # and what float64 itself rounds


def train(rank, options, steps=1, lr=1.0, input_scale=1.0, loss_scale=1.0):
    """Return weights before and after, factors and moments held here; rank None: one process on the global batch."""
    model = build()
    plain = {"rescale": "none", "damping": DAMPING, "factor_interval": 1, "inverse_interval": 4}
    optimizer, kfac = attach(model, lr=lr, **(plain | options))
    before = weights(model)
    for step in range(steps):
        x, y = batch(step, WORLD)
        if rank is not None:
            x, y = (t[rank * SHARE : (rank + 1) * SHARE] for t in (x, y))
        optimizer.zero_grad()
        (F.cross_entropy(model(x * input_scale), y) * loss_scale).backward()
        if rank is not None:
            average_gradients(model)
        optimizer.step()
    states = layer_states(kfac).items()
    factors = {(name, key): f for name, found in kfac.factors().items() for key, f in found.items()}
    moments = {name: state.moments.mean() for name, state in states if state.moments is not None}
    return before, weights(model), factors, moments


def part(rank, **scales):
    """Return one rank's own factors, measured by one process."""
    model = build()
    optimizer, kfac = attach(model, factor_interval=1)
    x, y = (t[rank * SHARE : (rank + 1) * SHARE] for t in batch(0, WORLD))
    (F.cross_entropy(model(x * scales.get("input_scale", 1.0)), y) * scales.get("loss_scale", 1.0)).backward()
    optimizer.step()
    return {(name, key): f for name, found in kfac.factors().items() for key, f in found.items()}


def trace(factor):
    """Of all blocks together."""
    return factor.diagonal(dim1=-2, dim2=-1).sum()


SCALES = [
    {"input_scale": 1e4},
    {"loss_scale": 1e-6},
    {"loss_scale": 1e6},
    {"input_scale": 1e-3, "loss_scale": 1e3},
]
"""Sums of squares from about 1e-9 and less to 1e9 and more: beyond float16 on both sides."""


@pytest.mark.parametrize(
    ("wire_dtype", "scales"),
    [("float16", scales) for scales in SCALES] + [(wire_dtype, {}) for wire_dtype in UNIT],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["comm-opt", "replicated"])
def test_a_factor_is_off_by_no_more_than_its_roundings_on_the_wire(strategy, wire_dtype, scales):
    *_, exact, _ = train(None, {}, **scales)
    parts = [part(rank, **scales) for rank in range(WORLD)]
    options = {"strategy": strategy, "wire_dtype": wire_dtype}
    held = {}
    for *_, factors, _ in on_threads(WORLD, lambda rank: train(rank, options, **scales)):
        held |= factors
    assert held.keys() == exact.keys()
    for name, factor in exact.items():
        mean = sum(p[name] for p in parts) / WORLD
        torch.testing.assert_close(mean, factor, rtol=1e-10, atol=1e-10 * float(trace(factor)))  # the oracle holds
        bound = gamma(wire_dtype) * sum(p[name].abs() for p in parts) / WORLD
        if wire_dtype == "float16":
            bound = bound + roundings(wire_dtype) * 2.0**-25 * trace(factor) / 16
        assert ((held[name] - factor).abs() <= bound).all(), name
    rounded = [name for name in exact if not torch.equal(held[name], exact[name])]
    assert rounded  # it did travel in fewer bits


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2).max())


@pytest.mark.parametrize("wire_dtype", UNIT)
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", "hybrid-opt"])
def test_a_step_is_off_by_no_more_than_the_factors_errors_over_the_damping(strategy, wire_dtype):
    """v = (F + d)^-1 g. With F + E for F: |v' - v| <= |E|/d |v|, and E = A' x G' - A x G, |E| <= |dA||G| + |A'||dG|.
    A preconditioned gradient that travels is rounded once more: u, float16's being bfloat16's."""
    before, after, exact, _ = train(None, {})
    found = on_threads(WORLD, train, {"strategy": strategy, "wire_dtype": wire_dtype})
    held = {key: factor for *_, factors, _ in found for key, factor in factors.items()}
    assert_ranks_are_bitwise_equal([w for _, w, *_ in found])
    names = [n for n, key in exact if key == "A"]
    unit = UNIT["bfloat16" if wire_dtype == "float16" else wire_dtype]
    position = 0
    for name in names:
        number = 1 if name == "5" else 2  # weight, bias
        here = slice(position, position + number)
        position += number
        a, g, a_wire, g_wire = exact[name, "A"], exact[name, "G"], held[name, "A"], held[name, "G"]
        error = norm(a_wire - a) * norm(g) + norm(a_wire) * norm(g_wire - g)
        step = torch.cat([(q - p).flatten() for p, q in zip(before[here], after[here], strict=True)])
        wired = torch.cat([(q - p).flatten() for p, q in zip(before[here], found[0][1][here], strict=True)])
        bound = (error / DAMPING) + unit * (1 + error / DAMPING)
        assert (wired - step).norm() <= (bound + 1e-12) * step.norm(), name


@pytest.mark.parametrize("wire_dtype", UNIT)
@pytest.mark.parametrize("options", [{"strategy": "comm-opt"}, {"strategy": "sharded"}, {"strategy": "replicated"},
                                     {"strategy": "hybrid-opt", "curvature": "ekfac"}, {"strategy": "local"}],
                         ids=lambda o: "-".join(o.values()))  # fmt: skip
def test_ranks_are_bitwise_equal_whatever_the_wire(options, wire_dtype):
    found = on_threads(WORLD, train, options | {"wire_dtype": wire_dtype}, 5, 0.01)
    assert_ranks_are_bitwise_equal([w for _, w, *_ in found])
    assert all(p.isfinite().all() for p in found[0][1])


@pytest.mark.parametrize("loss_scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("wire_dtype", UNIT)
def test_second_moments_survive_the_wire_at_any_scale_of_the_loss(wire_dtype, loss_scale):
    """Their sum is that of the squared gradients, in any basis; at lr 0 these are the same. float16's smallest number
    takes from each of at most 102 entries of a layer what it takes from a factor's."""
    settings = {"curvature": "ekfac"}
    *_, exact = train(None, settings, 2, 0.0, loss_scale=loss_scale)
    settings |= {"strategy": "comm-opt", "wire_dtype": wire_dtype}
    tiny = 102 * (WORLD + 1) * 2.0**-25 / 16 if wire_dtype == "float16" else 0.0
    for *_, moments in on_threads(WORLD, lambda rank: train(rank, settings, 2, 0.0, loss_scale=loss_scale)):
        assert moments.keys() == exact.keys()
        for name, wanted in exact.items():
            found = float(moments[name].sum())
            assert found == pytest.approx(float(wanted.sum()), rel=gamma(wire_dtype) + tiny), name


# --- triangles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_triangle_holds_each_entry_once_and_gives_the_matrix_back(blocks):
    for dim in range(1, 41):
        check_triangle(dim, blocks)


def check_triangle(dim, blocks):
    entries = torch.arange(blocks * dim * dim, dtype=torch.float64).view(blocks, dim, dim) + 1
    matrix = entries.triu() + entries.triu(1).mT
    packed = pack_triangle(matrix)
    assert packed.shape == (blocks, dim * (dim + 1) // 2)
    assert packed.is_contiguous()
    row, column = torch.triu_indices(dim, dim)
    assert torch.equal(packed.sort(dim=1).values, matrix[:, row, column].sort(dim=1).values)
    assert torch.equal(unpack_triangle(packed, dim), matrix)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_triangles_keep_the_dtype_and_what_is_not_finite(dtype):
    matrix = torch.tensor(
        [[[1.0, float("inf"), 3.0], [float("inf"), float("nan"), 5.0], [3.0, 5.0, -0.0]]], dtype=dtype
    )
    found = unpack_triangle(pack_triangle(matrix), 3)
    torch.testing.assert_close(found, matrix, rtol=0, atol=0, equal_nan=True)
    assert found.dtype == dtype
