"""block_dim: factors in pieces, against whole matrices with zeros between the pieces (docs/notes/013-blocks.md)."""

import copy
import dataclasses
import functools
import io
import itertools
import re
import warnings

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from helpers_blocks import attach, batch, build, in_pieces, shape_of, whole_matrices
from helpers_exact import square_loss, token_loss
from helpers_parity import (
    EXACT,
    SGD,
    average_in_one,
    cut,
    mean_loss,
    oracle,
    part,
    summed_loss,
    train,
    train_unevenly,
    weights_of,
)
from helpers_parity import batch as parity_batch
from helpers_parity import build as parity_build
from helpers_ranks import on_threads
from torch import nn

from dkfac import KFAC
from dkfac.plan.program import expand
from dkfac.plan.strategies import FULL_STATISTICS

STEPS = 13
"""Refreshes at 0, 4, 8 and 12."""
RHYTHM = {"factor_interval": 2, "inverse_interval": 4, "factor_decay": 0.9}
PLAIN = {"announce": False, "warmup_refresh": None, "norm_form": "unit"}
KFACS = {"curvature": "kfac", "solver": "eigen", "damping": 0.1, "rescale": "none"}
RATE = {"lr": 0.02, "momentum": 0.5}
"""So that without a rescale nothing diverges, where rounding would grow."""
LOSSES = {"tokens": token_loss}


def terms_of(x, net):
    return x.numel() if net == "tokens" else len(x)


class ExactOracle(ref.ReferenceKFAC):
    """With the Gauss-Newton G of a cross-entropy."""

    def _measure(self, inputs, _targets, terms):
        s = self.settings
        found = ref.exact_factors(self.model, inputs, list(self.modules), "cross_entropy", terms, s.weight_sharing)
        for name, module in self.modules.items():
            for key, factor in ref.cut_factors(module, found[name], s.block_dim).items():
                self.running[name][key] = ref.averaged(self.running[name].get(key), factor, s.factor_decay)


def trained(net, block_dim, *, steps=STEPS, micro=1, loss=None, **options):
    """Train with dkfac; returns the model, the optimizer and K-FAC."""
    model, loss = build(net), loss or LOSSES.get(net, square_loss)
    optimizer = torch.optim.SGD(model.parameters(), **RATE)
    options = PLAIN | RHYTHM | KFACS | options | ({"loss_terms": "token"} if net == "tokens" else {})
    kfac = attach(model, optimizer, block_dim, **options)
    for step in range(steps):
        step_once(model, optimizer, step, net, loss, micro)
    return model, optimizer, kfac


def step_once(model, optimizer, step, net, loss=square_loss, micro=1):
    optimizer.zero_grad()
    for x, y in zip(*(t.chunk(micro) for t in batch(step, net)), strict=True):
        (loss(model(x), y) / terms_of(x, net) / micro).backward()
    optimizer.step()


def expected(net, block_dim, layers, *, steps=STEPS, loss=None, kind=ref.ReferenceKFAC, **options):
    """Return the oracle after as many steps."""
    own = ({"loss_terms": "token"} if net == "tokens" else {}) | KFACS | RHYTHM | RATE | options
    settings = ref.ReferenceSettings(block_dim=block_dim, **own)
    found = kind(lambda: build(net), layers, loss or LOSSES.get(net, square_loss), settings)
    found.run([batch(step, net) for step in range(steps)])
    return found


def assert_weights(model, wanted, tolerance=1e-9):
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def names_of(kfac):
    return [layer.name for layer in kfac.layers]


def assert_equals_the_oracle(net, block_dim, *, ours=None, **options):
    """``ours``: options of dkfac alone."""
    kind, loss = options.pop("kind", ref.ReferenceKFAC), options.pop("loss", None)
    model, _, kfac = trained(net, block_dim, loss=loss, **options, **(ours or {}))
    wanted = expected(net, block_dim, names_of(kfac), kind=kind, loss=loss, **options)
    assert_weights(model, wanted.model)
    moved = [float((p - q).abs().max()) for p, q in zip(weights_of(model), weights_of(build(net)), strict=True)]
    assert 1e-4 < min(moved) <= max(moved) < 10, f"no training, or one that diverges: {moved}"


# --- equal to the oracle -----------------------------------------------------------------------------------------

SOLVERS = {
    "eigen": {},
    "eigen, length of the gradient": {"rescale": "norm-global", "damping": 1e-3},
    "eigen, relative": {"damping_mode": "relative", "damping": 0.3},
    "cholesky": {"solver": "cholesky"},
    "cholesky, relative": {"solver": "cholesky", "damping_mode": "relative", "damping": 0.3, "rescale": "norm-global"},
    "warm-eigen": {"solver": "warm-eigen"},
    "warm-eigen, relative": {"solver": "warm-eigen", "damping_mode": "relative", "rescale": "norm-global"},
    "ekfac": {"curvature": "ekfac"},
    "ekfac, relative": {"curvature": "ekfac", "damping_mode": "relative", "damping": 0.3, "rescale": "norm-global"},
    "norm by layer": {"rescale": "norm"},
    "held back": {"rescale": "norm-kl", "kl_clip": 1e-4},
}


FOUR = ["eigen", "cholesky", "warm-eigen", "ekfac"]


@pytest.mark.parametrize(("block_dim", "solver"), [(n, s) for n in (None, 8, 3) for s in (FOUR if n == 3 else SOLVERS)])
def test_linear_layers_equal_the_oracle(block_dim, solver):
    assert_equals_the_oracle("linears", block_dim, **SOLVERS[solver])


CUT = [("convolutions", 8), ("convolutions", 18), ("convolutions", 30), ("grouped", 8), ("sequences", 8), ("tokens", 8)]
CUT += [("edge", 8)]
WHOLE = [(net, None) for net in ("convolutions", "grouped", "sequences", "tokens")]
BY_WIDTH = {8: FOUR[:1], 18: FOUR[:2] + FOUR[3:], 30: FOUR[:3]}
RELATIVE = [("grouped", "cholesky, relative"), ("sequences", "eigen, relative"), ("tokens", "cholesky, relative")]


def other_cases():
    """Every network with every solver; some of them, which take seconds each, only by hand."""
    for i, (net, block_dim) in enumerate(CUT + WHOLE):
        for j, solver in enumerate(FOUR):
            rarely = (
                (i + j) % 4 != 0 if block_dim is None else net == "convolutions" and solver not in BY_WIDTH[block_dim]
            )
            yield pytest.param(net, block_dim, solver, marks=pytest.mark.slow if rarely else ())
    for (net, solver), block_dim in itertools.product(RELATIVE, (8, None)):
        yield pytest.param(net, block_dim, solver, marks=pytest.mark.slow if block_dim is None else ())


@pytest.mark.parametrize(("net", "block_dim", "solver"), list(other_cases()))
def test_other_layers_equal_the_oracle(net, block_dim, solver):
    assert_equals_the_oracle(net, block_dim, **SOLVERS[solver])


@pytest.mark.parametrize(
    ("net", "block_dim"), [("convolutions", 30), ("sequences", 8), ("tokens", 8), ("tokens", None)]
)
def test_positions_that_are_averaged_equal_the_oracle(net, block_dim):
    assert_equals_the_oracle(net, block_dim, weight_sharing="reduce")


def cross_entropy(output, y):
    """Of labels that follow from the targets."""
    return F.cross_entropy(output, y.argmax(1), reduction="sum")


@pytest.mark.parametrize("block_dim", [None, 8])
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_the_exact_fisher_equals_the_oracle(solver, block_dim):
    ours = {"fisher": "exact", "fisher_loss": "cross-entropy"}
    assert_equals_the_oracle("linears", block_dim, kind=ExactOracle, loss=cross_entropy, ours=ours, solver=solver)


@pytest.mark.parametrize(
    ("net", "block_dim"), [("linears", 8), ("linears", None), ("convolutions", 18), ("grouped", 8)]
)
def test_two_micro_batches_equal_the_oracle_on_all_of_the_batch(net, block_dim):
    assert_equals_the_oracle(net, block_dim, ours={"micro": 2, "accumulate": "mean"})


@pytest.mark.parametrize("block_dim", [None, 8])
def test_norm_layers_of_one_block_are_not_cut(block_dim):
    assert_equals_the_oracle("tokens", block_dim, norm_form="full")
    factors = trained("tokens", block_dim, steps=1, norm_form="full")[2].factors()
    assert factors["1"]["F"].shape == (40, 40)


@pytest.mark.parametrize("options", [{}, {"solver": "cholesky"}, {"curvature": "ekfac"}], ids=str)
@pytest.mark.parametrize("net", ["linears", "grouped"])
def test_wider_than_everything_it_changes_nothing(net, options):
    whole, same = (trained(net, block_dim, **options)[0] for block_dim in (None, 1000))
    assert all(map(torch.equal, whole.parameters(), same.parameters()))


@pytest.mark.parametrize("net", ["linears", "convolutions", "grouped", "sequences", "tokens"])
def test_is_an_approximation_that_can_be_seen(net):
    whole, pieces, fewer = (weights_of(trained(net, block_dim)[0]) for block_dim in (None, 8, 4))
    for a, b in itertools.combinations((whole, pieces, fewer), 2):
        assert max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True)) > 1e-3


def test_the_whole_dimension_is_what_max_dim_tests():
    model = nn.Sequential(nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 3))
    for block_dim in (None, 8):
        with attach(model, None, block_dim, max_dim=55, **PLAIN, **KFACS) as kfac:
            assert names_of(kfac) == ["0"]


# --- what factors() returns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "block_dim"),
    [("linears", 8), ("linears", 3), ("convolutions", 8), ("convolutions", 30), ("grouped", 8), ("sequences", 8),
     ("tokens", 8), ("edge", 8), ("linears", 1000)],
)  # fmt: skip
def test_factors_are_the_diagonal_blocks_of_whole_ones(net, block_dim):
    whole, found = (trained(net, dim, steps=1)[2].factors() for dim in (None, block_dim))
    model, sizes = build(net), []
    assert list(found) == list(whole)
    for name, factors in found.items():
        module = model.get_submodule(name)
        wanted = in_pieces(module, whole[name], block_dim)
        assert sorted(factors) == sorted(wanted), name
        for key, factor in factors.items():
            torch.testing.assert_close(
                factor, wanted[key], rtol=1e-12, atol=1e-14, msg=lambda m, n=name, k=key: f"{n}.{k}: {m}"
            )
            sizes += [factor.shape[-1]] if key[0] == "G" or (key[0] == "A" and factor.ndim > 1) else []
        if not isinstance(module, ref.NORMS):
            torch.testing.assert_close(
                whole_matrices(module, factors, block_dim)["A"],
                ref.cut_factors(module, whole_matrices(module, whole[name], None), block_dim)["A"],
            )
    assert max(sizes) <= block_dim


@pytest.mark.parametrize("block_dim", [None, 1, 3, 8, 18, 30, 1000])
@pytest.mark.parametrize("net", ["linears", "convolutions", "grouped", "sequences", "tokens", "edge"])
def test_how_pieces_are_read_agrees_with_the_oracle(net, block_dim):
    """Of the helpers: from whole matrices to what is returned and back, without K-FAC."""
    generator = torch.Generator().manual_seed(0)
    for module in build(net):
        if hasattr(module, "weight") and not isinstance(module, ref.NORMS):
            groups, a, g = shape_of(module)
            whole = {key: torch.randn(groups, n, n, generator=generator) for key, n in (("A", a), ("G", g))}
            given = {key: value.squeeze(0) if groups == 1 else value for key, value in whole.items()}
            if isinstance(module, nn.Embedding):
                given["A"] = whole["A"][0].diagonal()
                whole["A"] = torch.diag_embed(given["A"])[None]
            found = whole_matrices(module, in_pieces(module, given, block_dim), block_dim)
            for key, wanted in ref.cut_factors(module, whole, block_dim).items():
                assert torch.equal(found[key], wanted)


def test_shapes_of_factors():
    """Some of them written out, as the oracle's own rules decide above."""
    linears, sequences, grouped = (trained(net, 8, steps=1)[2].factors() for net in ("linears", "sequences", "grouped"))

    def shapes(factors):
        return {key: tuple(factor.shape) for key, factor in factors.items()}

    assert shapes(linears["0"]) == {"A": (4, 5, 5), "G": (2, 6, 6), "G_rest": (5, 5)}
    assert shapes(linears["2"]) == {"A": (2, 6, 6), "A_rest": (5, 5), "G": (2, 8, 8)}
    assert shapes(linears["4"]) == {"A": (2, 8, 8), "G": (5, 5)}
    assert shapes(linears["6"]) == {"A": (6, 6), "G": (3, 3)}
    assert shapes(sequences["4"]) == {"A": (2, 6, 6), "A_rest": (2, 4, 4), "G": (2, 7, 7), "G_rest": (2, 6, 6)}
    assert shapes(grouped["0"]) == {"A": (18, 3, 3), "G": (6, 1, 1)}
    assert shapes(grouped["4"]) == {"A": (26, 4, 4), "G": (2, 5, 5)}


@pytest.mark.parametrize("block_dim", [None, 2])
def test_of_flattened_maps_only_g_is_cut(block_dim):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    net, own = net.double(), {"curvature": "kfac", "solver": "eigen", "experimental": {"flattened": {"3": 3}}}
    kfac = attach(net, None, block_dim, announce=False, **own)
    F.cross_entropy(net(torch.randn(9, 2, 3, 3, dtype=torch.float64)), torch.arange(9) % 3).backward()
    kfac.step()
    shapes = {key: tuple(factor.shape) for key, factor in kfac.factors()["3"].items()}
    assert shapes == {"A_C": (3, 3), "A_S": (4, 4), "G": (4, 4) if block_dim is None else (2, 2, 2)}
    assert all(p.grad.isfinite().all() for p in net.parameters())


# --- several ranks -----------------------------------------------------------------------------------------------

STRATEGIES = (*FULL_STATISTICS, "auto")
ON_RANKS = {"net": "wide", "steps": 10, "curvature": "kfac"}
USUAL = [(4, strategy, 8, "eigen") for strategy in STRATEGIES]
USUAL += [(2, "sharded", 8, "cholesky"), (3, "comm-opt", 8, "warm-eigen"), (3, "hybrid-opt", 64, "eigen")]
USUAL += [(2, "comm-opt", 64, "cholesky"), (4, "spd", 64, "warm-eigen"), (3, "sharded", None, "eigen")]
USUAL += [(2, "layer-wise", 8, "ekfac"), (3, "factor-wise", 8, "cholesky"), (4, "mem-opt", None, "cholesky")]
ALL = itertools.product((2, 3, 4), STRATEGIES, (None, 8, 64), ("eigen", "cholesky", "warm-eigen", "ekfac"))


def on_ranks(options):
    own = dict(options)
    if own["solver"] == "ekfac":
        own |= {"solver": "eigen", "curvature": "ekfac", "damping": 1e-2}
    return {key: value for key, value in own.items() if (key, value) != ("block_dim", None)}


@functools.cache
def one_process(block_dim, solver):
    return train(**on_ranks(ON_RANKS | {"block_dim": block_dim, "solver": solver}))


def assert_ranks(found, wanted):
    for rank, weights in enumerate(found):
        for p, q, first in zip(weights, wanted, found[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=lambda m, r=rank: f"rank {r}: {m}")
            assert torch.equal(p, first), f"rank {rank} is not bitwise rank 0"


@pytest.mark.parametrize(
    ("world_size", "strategy", "block_dim", "solver"),
    USUAL + [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in USUAL],
)
def test_ranks_train_like_one_process(world_size, strategy, block_dim, solver):
    options = on_ranks(ON_RANKS | {"block_dim": block_dim, "solver": solver, "strategy": strategy})
    found = on_threads(world_size, lambda rank: train(rank, world_size, **options))
    assert_ranks(found, one_process(block_dim, solver))


@pytest.mark.parametrize("block_dim", [None, 8])
def test_one_process_on_that_network_equals_the_oracle(block_dim):
    steps = [cut(step, [24], "wide") for step in range(8)]
    own = {} if block_dim is None else {"block_dim": block_dim}
    options = {"curvature": "kfac", "solver": "eigen", "rescale": "norm-global"}
    found, _ = train_unevenly(0, steps, net="wide", average=lambda _model: None, **options, **own)
    layers = [name for name, module in parity_build("wide").named_children() if isinstance(module, nn.Linear)]
    for p, q in zip(found, oracle(steps, layers, net="wide", **options, **own), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block_dim", [None, 8])
def test_local_uses_the_owners_statistics_and_everyones_gradient(block_dim):
    steps = [cut(step, (9, 9), "wide") for step in range(8)]
    own = {} if block_dim is None else {"block_dim": block_dim}
    options = {"curvature": "kfac", "solver": "eigen", "rescale": "norm-global", "damping": 1e-2} | own
    found = on_threads(2, lambda rank: train_unevenly(rank, steps, net="wide", strategy="local", **options))
    owners = {name: ranks[0] for name, ranks in found[0][1].items()}
    assert len(set(owners.values())) == 2
    assert_ranks([weights for weights, _ in found], oracle(steps, list(owners), net="wide", owners=owners, **options))


# --- bytes -------------------------------------------------------------------------------------------------------


def packed(module, block_dim):
    """Elements of a layer's factors on the wire: a triangle of each piece; the bias's is not sent."""
    groups, widths, total = shape_of(module)[0], ref.layer_pieces(module, block_dim), {}
    for key in ("A", "G"):
        own = widths[key][:-1] if key == "A" and ref.folds_bias(module) and len(widths[key]) > 1 else widths[key]
        total[key] = groups * sum(w * (w + 1) // 2 for w in own)
    return total


def sent_factors(rank, net, block_dim, strategy):
    """Return the elements of each factor in the reductions of the plan that K-FAC made, ``A_rest`` with ``A``."""
    model = build(net)
    with attach(model, None, block_dim, strategy=strategy, announce=False, curvature="kfac", solver="eigen") as kfac:
        found = {}
        reductions = [t for t in expand(kfac.plan).stage("factors") if t.how in ("all-reduce", "reduce-scatter")]
        for sent in itertools.chain(*(t.parts for t in reductions)):
            key = (sent.layer, sent.key.removesuffix("_rest"))
            found[key] = found.get(key, 0) + sent.elements
        assert sum(t.used for t in reductions) == sum(found.values())
        return found


@pytest.mark.parametrize("strategy", ["comm-opt", "replicated", "sharded"])
@pytest.mark.parametrize(
    ("net", "block_dim"), [("linears", None), ("linears", 8), ("convolutions", 30), ("grouped", 8)]
)
def test_pieces_are_all_that_is_sent(net, block_dim, strategy):
    wanted = {}
    for name, module in build(net).named_children():
        if hasattr(module, "weight"):
            wanted |= {(name, key): elements for key, elements in packed(module, block_dim).items()}
    for found in on_threads(3, sent_factors, net, block_dim, strategy):  # of weights, a plan knows the shapes alone
        assert found == wanted


def test_pieces_are_a_fraction_of_whole_factors():
    module = build("convolutions")[2]
    assert packed(module, None)["A"] == 73 * 37
    assert packed(module, 30)["A"] == 4 * 9 * 19


# --- states ------------------------------------------------------------------------------------------------------

VARIANTS = {
    "eigen": (torch.optim.SGD, SGD, {"curvature": "kfac", "solver": "eigen"}),
    "cholesky": (torch.optim.SGD, SGD, {"curvature": "kfac", "solver": "cholesky"}),
    "warm-eigen": (torch.optim.SGD, SGD, {"curvature": "kfac", "solver": "warm-eigen"}),
    "ekfac": (torch.optim.SGD, SGD, {"curvature": "ekfac", "solver": "eigen", "damping": 1e-2}),
    "adam-eigen": (torch.optim.AdamW, {"lr": 1e-2}, {"curvature": "adam-eigen"}),
    "default, SGD": (torch.optim.SGD, SGD, {}),
    "default, AdamW": (torch.optim.AdamW, {"lr": 1e-2}, {}),
}
RESUMED = {"factor_interval": 2, "inverse_interval": 4, "warmup_refresh": None, "announce": False}


class Run:
    """A model, its optimizer and K-FAC on a network of which 8 cuts everything."""

    def __init__(self, variant, block_dim, net="wide"):
        kind, settings, options = VARIANTS[variant]
        self.net, self.model = net, parity_build(net)
        self.optimizer = kind(self.model.parameters(), **settings)
        self.kfac = attach(self.model, self.optimizer, block_dim, **RESUMED, **options)

    def train(self, begin, end):
        for step in range(begin, end):
            x, y = parity_batch(step, self.net, size=32)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def saved(self):
        file = io.BytesIO()
        torch.save([own.state_dict() for own in (self.model, self.optimizer, self.kfac)], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved):
        for own, state in zip((self.model, self.optimizer, self.kfac), saved, strict=True):
            own.load_state_dict(copy.deepcopy(state))
        return self


@pytest.mark.parametrize("block_dim", [None, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_resumes_to_the_last_bit(variant, block_dim):
    straight = weights_of(Run(variant, block_dim).train(0, 10).model)
    for stop in (3, 4, 5):
        saved = Run(variant, block_dim).train(0, stop).saved()
        again = Run(variant, block_dim).load(saved).train(stop, 10)
        assert all(map(torch.equal, weights_of(again.model), straight)), stop


def loaded_in_pieces(variant, saved, block_dim=8):
    """Load a state with whole factors; if there is a warning, it is about block_dim."""
    run = Run(variant, block_dim)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.load(saved)
    assert all("block_dim" in str(one.message) for one in said), [str(one.message) for one in said]
    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_with_whole_factors_loads_into_pieces(variant):
    for stop in (1, 5, 8):
        whole = Run(variant, None).train(0, stop)
        found = loaded_in_pieces(variant, whole.saved())
        for name, factors in found.kfac.factors().items():
            wanted = in_pieces(whole.model.get_submodule(name), whole.kfac.factors()[name], 8)
            assert sorted(factors) == sorted(wanted)
            for key, factor in factors.items():
                assert torch.equal(factor, wanted[key]), f"{name}.{key}"
        before = weights_of(found.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.train(stop, stop + 6)
        assert all(p.isfinite().all() for p in weights_of(found.model))
        assert all((p != q).any() for p, q in zip(weights_of(found.model), before, strict=True))
        assert found.kfac.metrics()["skipped_batches"] == 0


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_after_loading_whole_factors_steps_are_those_of_pieces(solver):
    """The next step decomposes, so that nothing of whole factors is left but their diagonal blocks."""
    _, settings, _ = VARIANTS[solver]
    own = {"solver": solver, "rescale": "norm-kl", "kl_clip": 1e-3, "damping": 3e-4, **settings}
    rhythm = {"factor_interval": 2, "inverse_interval": 4}
    found = expected_wide(ref.ReferenceSettings(**own, **rhythm), 0, 8)
    found.settings = dataclasses.replace(found.settings, block_dim=8)
    for name, running in found.running.items():
        cut_up = ref.cut_factors(found.modules[name], {key: running[key][0] for key in ("A", "G")}, 8)
        cut_up["A"][:, -1, -1] = running["A"][0][:, -1, -1]  # of a bias: a sum, of which the mean is 1
        found.running[name] = {key: (cut_up[key], running[key][1]) for key in ("A", "G")}
    expected_wide(found, 8, 14)
    run = loaded_in_pieces(solver, Run(solver, None).train(0, 8).saved()).train(8, 14)
    assert_weights(run.model, found.model)


def expected_wide(found, begin, end):
    if isinstance(found, ref.ReferenceSettings):
        layers = [name for name, module in parity_build("wide").named_children() if isinstance(module, nn.Linear)]
        found = ref.ReferenceKFAC(lambda: parity_build("wide"), layers, summed_loss, found)
    found.run([parity_batch(step, "wide", size=32) for step in range(begin, end)])
    return found


@pytest.mark.parametrize("other", [None, 16, 4])
@pytest.mark.parametrize("variant", ["eigen", "cholesky", "default, SGD"])
def test_another_block_dim_is_refused_with_both_named(variant, other):
    saved = Run(variant, 8).train(0, 3).saved()[2]
    run = Run(variant, other).train(0, 2)
    before = repr(run.kfac.state_dict())
    with pytest.raises(ValueError, match="block_dim") as refused:
        run.kfac.load_state_dict(saved)
    said = re.sub(r"\[[^]]*\]", "", str(refused.value))  # without shapes
    for number in (8, other):
        assert re.search(rf"\b{number}\b", said), f"{number} in {refused.value}"
    assert repr(run.kfac.state_dict()) == before


@pytest.mark.parametrize("block_dim", [None, 8])
def test_four_ranks_go_on_as_two(block_dim):
    options = on_ranks(ON_RANKS | {"block_dim": block_dim, "solver": "eigen"})

    def job(rank, world_size, begin, end, saved=()):
        return part_of_a_run(rank, world_size, begin, end, saved, options)

    saved = on_threads(4, job, 4, 0, 5)[0][1]
    assert_ranks([weights for weights, _ in on_threads(2, job, 2, 5, 10, saved)], one_process(block_dim, "eigen"))


def part_of_a_run(rank, world_size, begin, end, saved, options, *, gather=True):
    """``helpers_parity.train`` from a step to another, with what was saved in between."""
    own = {key: value for key, value in options.items() if key not in ("net", "steps")}
    model = parity_build(options["net"])
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=1e-3, **SGD)
    kfac = KFAC(model, optimizer, **(EXACT | {"strategy": "sharded"} | own))
    parts = (model, optimizer, kfac)
    for own, state in zip(parts, saved, strict=False):
        own.load_state_dict(copy.deepcopy(state))
    for step in range(begin, end):
        x, y = (part(t, rank, world_size) for t in parity_batch(step, options["net"]))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        average_in_one(model)
        optimizer.step()
    states = [model.state_dict(), optimizer.state_dict(), kfac.state_dict(gather=gather)]
    return weights_of(model), copy.deepcopy(states)


@pytest.mark.parametrize("strategy", ["sharded", "local", "mem-opt", "spd"])
def test_each_ranks_own_state_loads_into_pieces_alike(strategy):
    """A rank's own state has nothing of some layers. It must convert them all the same."""
    options = on_ranks(ON_RANKS | {"solver": "eigen"})

    def job(rank, begin, end, saved, block_dim, own):
        mine = saved[rank] if saved else ()
        return part_of_a_run(rank, 2, begin, end, mine, own | {"block_dim": block_dim}, gather=False)

    own = options | {"strategy": strategy}
    saved = [state for _, state in on_threads(2, job, 0, 5, None, None, own)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # spd: a rest has another owner than its factor had
        found = [weights for weights, _ in on_threads(2, job, 5, 10, saved, 8, own)]
    assert all(map(torch.equal, *found))


def test_a_state_of_another_model_is_not_said_to_have_another_block_dim():
    saved = Run("eigen", 8).train(0, 3).saved()[2]
    model = nn.Sequential(nn.Linear(80, 18), nn.Tanh(), nn.Linear(18, 17, bias=False), nn.Tanh(), nn.Linear(17, 9))
    kfac = attach(model.double(), torch.optim.SGD(model.parameters(), **SGD), 8, **RESUMED)
    with pytest.raises(ValueError, match=r"\[9, 8, 8\] in the state and \[10, 8, 8\] in the model"):
        kfac.load_state_dict(saved)


@pytest.mark.parametrize("block_dim", [None, 4])
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
@pytest.mark.parametrize("norm_form", ["unit", "full"])
def test_a_bias_frozen_after_attach_counts_as_one_frozen_before(solver, norm_form, block_dim):
    """Of layers that are cut, and of a norm layer, whose decompositions are improved in place."""
    found = []
    for before in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 6)).double()
        biases = [model[i].bias for i in (0, 1, 3)]
        for bias in biases:
            bias.requires_grad_(not before)
        optimizer = torch.optim.SGD(model.parameters(), **RATE)
        attach(model, optimizer, block_dim, **(PLAIN | RHYTHM | KFACS | {"solver": solver, "norm_form": norm_form}))
        for bias in biases:
            bias.requires_grad_(False)
        for step in range(STEPS):
            x = torch.randn(24, 18, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            F.mse_loss(model(x[:, :12]), x[:, 12:]).backward()
            optimizer.step()
        found.append(model)
    assert_weights(*found)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_damping_bounds_the_update_of_a_bias_that_is_a_piece_of_its_own(solver):
    """With a tiny loss there is only damping: an update is at most the gradient divided by it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"curvature": "kfac", "damping": 1e-3, "rescale": "none", "block_dim": 16, "announce": False}
    KFAC(model, optimizer, solver=solver, **options)
    (0.01 * model(torch.randn(64, 40).double()).square().mean()).backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        old, grad = before[name]
        assert float((old - p.detach()).norm() / grad.norm()) <= 1000 * (1 + 1e-9), name
