"""R02, R10: the same global batch gives the same weights, whatever the world size and the strategy."""

import functools

import pytest
import torch
from helpers_parity import BATCH, build, cut, distinct, oracle, train, train_unevenly
from helpers_ranks import on_threads

from dkfac.config.settings import Settings
from dkfac.layers.find import find_layers
from dkfac.plan import make
from dkfac.plan.cluster import Cluster
from dkfac.plan.costs import Costs
from dkfac.plan.strategies import FULL_STATISTICS

STRATEGIES = (*FULL_STATISTICS, "auto")
WORLD_SIZES = (1, 2, 3, 4, 8, 16, 64)
RARELY = {"factor_interval": 5, "inverse_interval": 10}
"""For many ranks: what a step costs is Python, most of it in measuring and decomposing."""
OWNED, GRID = "sharded", "hybrid-opt"
"""Between them: factors to one owner, bases inside a group, gradients from an owner to all and to a part."""


def assert_all_close(ranks, expected):
    """Every rank has the expected weights to 1e-10, and all have the same bits."""
    for rank, weights in enumerate(ranks):
        for p, q, first in zip(weights, expected, ranks[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=lambda m, r=rank: f"rank {r}: {m}")
            assert torch.equal(p, first), f"rank {rank} is not bitwise rank 0"


def on_a_thread(rank, world_size, options):
    return train(rank, world_size, **options)


@functools.cache
def one_process(options):
    return train(**dict(options))


def assert_parity(world_size, **options):
    where = ("strategy", "worker_fraction", "replicate_factors", "fusion")
    expected = one_process(tuple((key, value) for key, value in options.items() if key not in where))
    assert_all_close(on_threads(world_size, on_a_thread, world_size, options), expected)


# --- every strategy at every world size ------------------------------------------------------------------------


def covering():
    for world_size in WORLD_SIZES:
        net = "deep" if world_size < 4 else "tiny"
        for group in distinct(STRATEGIES, world_size, net):
            if world_size < 64 or GRID in group:  # 64 ranks of one plan take as long as all plans on 16
                usual = world_size < 16 or (world_size == 16 and "comm-opt" in group)
                marks = [] if usual else pytest.mark.slow
                yield pytest.param(world_size, group[-1], net, id=f"{world_size}-{'='.join(group)}", marks=marks)


@pytest.mark.parametrize(("world_size", "strategy", "net"), list(covering()))
def test_threads_train_like_one_process(world_size, strategy, net):
    rhythm = {"factor_interval": 10, "inverse_interval": 10} if world_size > 8 else RARELY
    assert_parity(world_size, strategy=strategy, net=net, **({} if world_size < 3 else rhythm))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_threads_train_like_one_process_with_either_solver(solver, strategy, world_size):
    assert_parity(world_size, strategy=strategy, solver=solver)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sixty_four_ranks_train_like_one_process(strategy):
    assert_parity(64, strategy=strategy, net="tiny", **RARELY)


# --- every other setting that ranks have a part in ---------------------------------------------------------------

EXACT_FISHER = {"fisher": "exact", "fisher_loss": "cross-entropy"}
VARIANTS = {
    "cholesky, norm": {"solver": "cholesky", "rescale": "norm"},
    "cholesky, relative": {"solver": "cholesky", "damping_mode": "relative", "damping": 0.1, "net": "tiny"},
    "no rescale": {"rescale": "none", "damping": 0.1},
    "kl-clip, replicated factors": {"rescale": "kl-clip", "kl_clip": 1e-4, "damping": 0.1, "replicate_factors": True},
    "held back": {"rescale": "norm-kl", "kl_clip": 1e-5},
    "held back, conv, unit norms": {"rescale": "norm-kl", "kl_clip": 1e-5, "net": "vision", "norm_form": "unit"},
    "relative": {"damping_mode": "relative", "damping": 0.1},
    "ekfac": {"curvature": "ekfac", "damping": 1e-2},
    "warm-eigen": {"solver": "warm-eigen", "damping": 1e-2},
    "warm-eigen, ekfac": {"solver": "warm-eigen", "curvature": "ekfac", "damping": 1e-2, "replicate_factors": True},
    "exact": EXACT_FISHER,
    "conv": {"net": "vision"},
    "conv, reduce": {"net": "vision", "weight_sharing": "reduce"},
    "conv, unit norms": {"net": "vision", "norm_form": "unit"},
    "conv, full norms, cholesky": {"net": "vision", "norm_form": "full", "solver": "cholesky"},
    "conv, diagonal norms, relative": {"net": "vision", "norm_form": "diagonal", "damping_mode": "relative"},
    "tokens, unit norms": {"net": "language", "norm_form": "unit"},
    "tokens, reduce": {"net": "language", "weight_sharing": "reduce", "replicate_factors": True},
    "tokens, cholesky": {"net": "language", "solver": "cholesky"},
    "tokens, exact": {"net": "language", **EXACT_FISHER},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_train_like_one_process(variant):
    strategy, world_size = [(GRID, 4), (OWNED, 2)][list(VARIANTS).index(variant) % 2]
    assert_parity(world_size, strategy=strategy, **({"net": "small"} | VARIANTS[variant]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 6])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_train_like_one_process_under_every_strategy(variant, strategy, world_size):
    assert_parity(world_size, strategy=strategy, **VARIANTS[variant])


@pytest.mark.parametrize(("world_size", "workers"), [(4, 1), (4, 4), (6, 2), (6, 3)])
def test_the_number_of_workers_changes_nothing(world_size, workers):
    assert_parity(world_size, strategy=GRID, worker_fraction=workers / world_size, net="tiny", **RARELY)


@pytest.mark.parametrize(
    ("fusion", "strategy", "net"),
    [("optimal", GRID, "small"), ("spd", OWNED, "small"), ("spd", "comm-opt", "vision"), ("optimal", OWNED, "vision")],
)
def test_factors_reduced_in_several_buckets_train_like_one_process(fusion, strategy, net, monkeypatch):
    """The layers are so small that one bucket pays, unless a start-up costs nothing."""
    monkeypatch.setattr(make, "Cluster", lambda name: Cluster(name, Costs(latency_seconds=1e-9)))
    layers = [layer.spec for layer in find_layers(build(net), Settings(), None)[0]]
    plan = make.make_plan(layers, 4, make.Choices(strategy=strategy, fusion=fusion))
    assert len(plan.buckets) > 1
    assert_parity(4, strategy=strategy, net=net, fusion=fusion)


# --- ranks that differ: oracles written out ----------------------------------------------------------------------


def unevenly_on_a_thread(rank, steps, options):
    return train_unevenly(rank, steps, **options)


@functools.cache
def written_out(sizes, layers, owners, options):
    options = dict(options)
    steps = [cut(step, sizes[step % len(sizes)], options.get("net", "deep")) for step in range(20)]
    return oracle(steps, list(layers), owners=None if owners is None else dict(owners), **options)


def assert_equals_the_oracle(sizes, *, strategy, **options):
    """``sizes``: of the ranks' batches, one after another, again from the start when they are used up."""
    net = options.get("net", "deep")
    steps = [cut(step, sizes[step % len(sizes)], net) for step in range(20)]
    found = on_threads(len(sizes[0]), unevenly_on_a_thread, steps, {"strategy": strategy, **options})
    statistics, owners = found[0][1], None
    if strategy == "local":
        assert all(len(ranks) == 1 for ranks in statistics.values())
        assert len(set(statistics.values())) > 1
        owners = tuple((name, ranks[0]) for name, ranks in statistics.items())
    plain = tuple((key, value) for key, value in options.items() if key != "loss_terms")
    assert_all_close([weights for weights, _ in found], written_out(sizes, tuple(statistics), owners, plain))


LOCAL = {
    "eigen": {},
    "cholesky": {"solver": "cholesky"},
    "relative": {"damping_mode": "relative", "damping": 0.1},
    "kl-clip": {"rescale": "kl-clip", "kl_clip": 1e-4, "damping": 0.1},
    "held back": {"rescale": "norm-kl", "kl_clip": 1e-5},
    "ekfac": {"curvature": "ekfac", "damping": 0.05},
    "conv": {"net": "vision", "norm_form": "unit"},
    "tokens": {"net": "language", "loss_terms": "token"},
}


@pytest.mark.parametrize("variant", LOCAL)
def test_local_uses_the_owners_statistics_and_everyones_gradient(variant):
    assert_equals_the_oracle(((6, 6),), strategy="local", **LOCAL[variant])


def test_local_owners_measure_alone_where_ranks_outnumber_layers():
    assert_equals_the_oracle(((2,) * 7,), strategy="local")


UNEVEN = ((4, 4, 4), (4, 4, 1), (5, 1, 0), (0, 0, 6), (1, 1, 1), (0, 0, 0), (0, 7, 2))
"""Sizes of the ranks' batches; the empty ones have a gradient of zero, which counts in the mean."""
MICRO = (((2, 3), (4,), (1, 1, 1)), ((1,), (5, 0), (2, 2)), ((3,), (0,), (1, 4, 2)))
OPTIONS = {"deep": {}, "vision": {"norm_form": "unit"}, "language": {"loss_terms": "token"}}
SOME = [("deep", "replicated"), ("deep", OWNED), ("deep", "local"), ("vision", "comm-opt"), ("language", OWNED)]
ALL = [(net, strategy) for net in OPTIONS for strategy in (*STRATEGIES, "local")]


def slow(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("net", "strategy"), SOME + slow([case for case in ALL if case not in SOME]))
def test_ranks_with_other_batch_sizes_pool_their_factors_and_average_their_gradients(net, strategy):
    rhythm = {"factor_interval": 1, "inverse_interval": 2}
    assert_equals_the_oracle(UNEVEN, strategy=strategy, net=net, **rhythm, **OPTIONS[net])


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [(GRID, "mean"), (OWNED, "sum"), ("comm-opt", "terms"), ("local", "mean"), ("local", "terms")],
)
def test_ranks_with_other_micro_batches_pool_what_each_term_says(strategy, accumulate):
    assert_equals_the_oracle(MICRO, strategy=strategy, accumulate=accumulate, rescale="none", damping=0.1)


def test_summed_over_all_terms_uneven_ranks_equal_one_process_on_the_whole_batch():
    """accumulate="terms": each rank's loss is P/T times the sum over its terms, so that the mean over ranks is 1/T."""
    steps = [cut(step, (100, BATCH - 101, 1)) for step in range(20)]
    options = {"strategy": "comm-opt", "accumulate": "terms"}
    expected, _ = train_unevenly(0, [cut(step, (BATCH,)) for step in range(20)], average=lambda _model: None)
    assert_all_close([w for w, _ in on_threads(3, unevenly_on_a_thread, steps, options)], expected)


@pytest.mark.parametrize("strategy", ["comm-opt", OWNED, "local"])
def test_a_first_step_without_any_examples_is_as_if_it_had_not_been(strategy):
    steps = [cut(step, (4, 4, 2)) for step in range(5)]
    options = {"strategy": strategy, "factor_interval": 1, "inverse_interval": 1}
    plain = on_threads(3, unevenly_on_a_thread, steps, options)
    later = on_threads(3, unevenly_on_a_thread, [cut(99, (0, 0, 0)), *steps], options)
    assert_all_close([weights for weights, _ in later], plain[0][0])
