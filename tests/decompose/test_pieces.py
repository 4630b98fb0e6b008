"""split_dim: large factors decomposed as diagonal blocks, against an oracle that sets what is between them to zero."""

import pytest
import reference as ref
import torch
from helpers_parity import EXACT, SGD, build, cut, mean_loss, summed_loss, train, weights_of
from helpers_ranks import on_threads
from helpers_settings import arranged

from dkfac import KFAC
from dkfac.config.settings import Settings
from dkfac.layers.find import find_layers
from dkfac.ops import decompose, together
from dkfac.ops.decompose import Eigen, join, piece, places
from dkfac.plan.costs import Costs
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.program import expand
from dkfac.plan.spec import FactorSpec, LayerSpec, split

DIM = 23
"""The first layer's A, 61 wide, falls in pieces of 21, 20, 20; nothing else does."""


class SplitOracle(ref.ReferenceKFAC):
    """Plain K-FAC on factors without what is between their diagonal blocks, from a step on."""

    warmup = 0

    def _refresh(self, name):
        super()._refresh(name)
        for factor in self.used[name].values():
            dim = factor.shape[-1]
            if self.steps < self.warmup or dim <= DIM:
                continue
            number = -(-dim // DIM)
            of_piece = torch.repeat_interleave(
                torch.arange(number), torch.tensor([dim // number + (i < dim % number) for i in range(number)])
            )
            factor[..., of_piece[:, None] != of_piece] = 0


def expected(*, warmup=0, steps=12, **options):
    model = build("small")
    layers = [layer.name for layer in find_layers(model, Settings(), None)[0]]
    rhythm = {key: EXACT[key] for key in ("factor_interval", "inverse_interval", "damping")}
    settings = ref.ReferenceSettings(**({"rescale": "norm-global"} | SGD | rhythm | options))
    found = SplitOracle(lambda: build("small"), layers, summed_loss, settings)
    found.warmup = warmup
    for step in range(steps):
        ((x, y),) = cut(step, [24], "small")[0]
        found.step(x, y)
    return weights_of(found.model)


def trained(rank=0, world_size=1, steps=12, **options):
    model = build("small")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    kfac = KFAC(model, optimizer, **arranged(EXACT | {"split_dim": DIM} | options))
    for step in range(steps):
        ((x, y),) = cut(step, [24], "small")[0]
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()
    return weights_of(model), kfac


def assert_same(found, wanted, tolerance=1e-9):
    for p, q in zip(found, wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("warmup", [0, 8])
def test_equals_the_oracle(solver, warmup):
    assert_same(trained(solver=solver, split_warmup=warmup)[0], expected(solver=solver, warmup=warmup))


def test_is_an_approximation_that_can_be_seen():
    whole, pieces = trained(split_dim=None)[0], trained()[0]
    assert max(float((p - q).abs().max()) for p, q in zip(whole, pieces, strict=True)) > 1e-3


@pytest.mark.parametrize("solver", ["warm-eigen", "cholesky"])
@pytest.mark.parametrize("spread", [1, 3])
def test_renewed_in_place_it_stays_in_pieces_from_the_warm_up_on(solver, spread):
    options = {"solver": solver, "spread_refresh": spread, "inverse_interval": 4, "split_warmup": 5}
    for steps in (5, 30):
        kfac = trained(steps=steps, **options)[1]
        found = next(iter(kfac._engine.states.values())).decompositions["A"]
        matrix = found.vectors if isinstance(found, Eigen) else found.matrix
        between = matrix.clone()
        for here in places((21, 20, 20)):
            between[:, here, here] = 0
        assert bool((between == 0).all()) == (steps == 30)


SOLVERS, PLANS = ["eigen", "cholesky", "warm-eigen"], ["comm-opt", "hybrid-opt", "sharded"]


@pytest.mark.parametrize(
    ("solver", "strategy", "warmup"),
    [
        pytest.param(solver, plan, warmup, marks=() if (i + j + (warmup > 0)) % 3 == 0 else pytest.mark.slow)
        for i, solver in enumerate(SOLVERS)
        for j, plan in enumerate(PLANS)
        for warmup in (0, 5)
    ],
)
def test_is_the_same_on_several_ranks(solver, strategy, warmup):
    options = {"net": "small", "split_dim": DIM, "split_warmup": warmup, "solver": solver}
    alone = train(**options)
    for weights in on_threads(4, lambda rank: train(rank, 4, strategy=strategy, **options)):
        assert_same(weights, alone)


def test_adam_in_pieces_is_the_same_on_several_ranks():
    options = {"net": "small", "steps": 12, "adam": True, "split_dim": DIM, "split_warmup": 5}
    alone = train(**options)
    for weights in on_threads(2, lambda rank: train(rank, 2, **options)):
        assert_same(weights, alone)


def test_pieces_travel_and_cost_less():
    layers = [LayerSpec("a", "linear", (FactorSpec("A", 101), FactorSpec("G", 10)), 1010)]
    (cut_up,) = split(layers, 30)
    assert cut_up.factors[0].widths == (26, 25, 25, 25)
    assert cut_up.factors[1].pieces == 1
    whole, pieces = (make_plan(specs, 4, Choices(strategy="comm-opt")) for specs in (layers, [cut_up]))
    sent = {plan: next(iter(expand(plan).stage("decompositions"))).used for plan in (whole, pieces)}
    assert sent[whole] - sent[pieces] == 101 * 101 - 26 * 26 - 3 * 25 * 25
    costs = Costs()
    assert costs.decompose(cut_up.factors[0]) < costs.decompose(layers[0].factors[0]) / 12
    assert split([cut_up], None) == layers


def test_joined_pieces_are_the_pieces():
    torch.manual_seed(0)
    parts = [Eigen(torch.randn(2, n, n), torch.rand(2, n)) for n in (3, 2, 4)]
    whole = join(parts)
    for part, here in zip(parts, places((3, 2, 4)), strict=True):
        again = piece(whole, here)
        assert torch.equal(again.vectors, part.vectors)
        assert torch.equal(again.values, part.values)
    assert whole.vectors.count_nonzero() == 2 * (9 + 4 + 16)


def test_a_run_resumes_across_the_end_of_the_warm_up():
    options = {"split_dim": DIM, "split_warmup": 6}
    straight = trained(steps=12, **options)[0]
    saved = ()
    for begin, end in ((0, 3), (3, 7), (7, 12)):
        model = build("small")
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        kfac = KFAC(model, optimizer, **arranged(EXACT | options))
        for what, state in zip((model, optimizer, kfac), saved, strict=False):
            what.load_state_dict(state)
        for step in range(begin, end):
            ((x, y),) = cut(step, [24], "small")[0]
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        saved = (model.state_dict(), optimizer.state_dict(), kfac.state_dict())
    assert_same(weights_of(model), straight, 0.0)


@pytest.mark.parametrize("solver", ["cholesky", "warm-eigen"])
def test_pieces_of_one_size_are_renewed_together_as_each_would_be_alone(solver):
    pieces, blocks = (5, 4, 5, 4, 4), 3
    rows = torch.randn(blocks, 80, sum(pieces), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor, shift = rows.mT @ rows / 80, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    where = decompose.places(pieces)
    start = [
        decompose.Inverse(factor[:, w, w]) if solver == "cholesky" else decompose.eigen(factor[:, w, w] * 1.0)
        for w in where
    ]
    later = factor + 0.1 * torch.eye(sum(pieces), dtype=torch.float64).flip(0)[None]
    ((found, sound),) = together.renewed([(later, decompose.join(start), shift, pieces)])
    assert bool(sound.all())
    for w, old in zip(where, start, strict=True):
        ((alone, _),) = together.renewed([(later[:, w, w], old, shift, ())])
        for name, tensor in decompose.piece(found, w).tensors().items():
            torch.testing.assert_close(tensor, alone.tensors()[name], rtol=1e-9, atol=1e-12)
    later[1, 6, 6] = torch.nan  # in the second piece of the second block
    ((_, sound),) = together.renewed([(later, decompose.join(start), shift, pieces)])
    assert sound.tolist() == [True, False, True]


@pytest.mark.parametrize("multiple", [1, 8])  # to which sizes are rounded on a GPU
def test_factors_of_about_one_size_are_renewed_together_as_each_would_be_alone(multiple, monkeypatch):
    generator, jobs = torch.Generator().manual_seed(0), []
    for blocks, dim, pieces in ((2, 33, ()), (1, 64, (32, 32)), (3, 32, ()), (2, 12, ()), (1, 40, ())):
        rows = torch.randn(blocks, 200, dim, generator=generator, dtype=torch.float64)
        rows[..., dim // 2 :] *= 1e-3  # eigenvalues as small as what is padded
        rows[..., -1] = 0
        factor, shift = rows.mT @ rows / 200, torch.full((blocks,), 0.1, dtype=torch.float64)
        where = decompose.places(pieces or (dim,))
        old = decompose.join([decompose.eigen(factor[:, w, w]) for w in where])
        jobs.append((factor + 0.1 * rows[:, :dim].mT @ rows[:, :dim] / dim, old, shift, pieces))
    diagonal = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    jobs.append((diagonal, decompose.Eigen(None, diagonal + 1), torch.zeros(2), ()))
    alone = [together.renewed([job])[0] for job in jobs]
    monkeypatch.setattr(together, "aligned", lambda size, _: size + -size % multiple)
    real, sizes = together._renewed, []
    monkeypatch.setattr(together, "_renewed", lambda *given: sizes.append(tuple(given[0].shape)) or real(*given))
    both = together.renewed(jobs)
    padded = [(2, 12, 12), (7, 33, 33)] if multiple == 1 else [(2, 16, 16), (8, 40, 40)]
    assert sorted(sizes) == sorted([*padded, (2, 7), *([(1, 40, 40)] if multiple == 1 else [])])
    for (one, flags), (other, others) in zip(both, alone, strict=True):
        assert bool(flags.all())
        assert flags.tolist() == others.tolist()
        for name, tensor in other.tensors().items():
            torch.testing.assert_close(one.tensors()[name], tensor, rtol=1e-8, atol=1e-10)


def test_factors_of_two_devices_are_not_renewed_together():
    factor = torch.eye(6, dtype=torch.float64)[None] + 0.1
    job = (factor, decompose.eigen(factor), torch.ones(1), ())
    elsewhere = decompose.Eigen(*(t.to("meta") for t in (job[1].vectors, job[1].values)))
    here, there = together.renewed([job, (factor.to("meta"), elsewhere, torch.ones(1, device="meta"), ())])
    assert here[0].vectors.device.type == "cpu"
    assert there[0].vectors.device.type == "meta"
