"""R01: preconditioned gradients are those of the dense solve, to 1e-8 in float64."""

import copy
import itertools
import warnings

import pytest
import reference as ref
import torch
from helpers_exact import (
    LAYERS,
    NORMS,
    PLAIN,
    Repeat,
    assert_close,
    assert_solved,
    make,
    one_step,
    oracle_direction,
    oracle_factors,
    randn,
    square_loss,
)
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# One step against the dense solve


@pytest.mark.parametrize(("mode", "damping"), [("absolute", 1e-3), ("absolute", 1.0), ("relative", 1e-2)])
@pytest.mark.parametrize("kind", LAYERS)
def test_eigen_solves_the_damped_kronecker_system(kind, mode, damping):
    model, x, target, name = make(LAYERS[kind])
    factors = oracle_factors(model, x, target, [name])[name]
    _, before, after = one_step(model, x, target, damping=damping, damping_mode=mode)
    if mode == "relative":
        damping = ref.relative_damping(damping, factors["A"], factors["G"])
    assert_solved(after[name], oracle_direction(factors, before[name], damping))


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("kind", LAYERS)
def test_cholesky_splits_the_damping_over_the_factors(kind, mode):
    model, x, target, name = make(LAYERS[kind])
    factors = oracle_factors(model, x, target, [name], sharing="reduce")[name]
    options = {"damping": 1e-2, "damping_mode": mode, "solver": "cholesky", "weight_sharing": "reduce"}
    _, before, after = one_step(model, x, target, **options)
    damping = 1e-2 if mode == "absolute" else ref.relative_damping(1e-2, factors["A"], factors["G"])
    expected = oracle_direction(factors, before[name], damping, solve=ref.factored_precondition)
    assert_solved(after[name], expected)


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("form", ["unit", "full", "diagonal"])
@pytest.mark.parametrize("kind", ["layer", "layer-2d", "layer-no-bias", "group", "rms"])
def test_norm_layers_solve_with_their_one_factor_and_their_own_damping(kind, form, mode, solver):
    model, x, target, name = make(NORMS[kind])
    factor = oracle_factors(model, x, target, [name], form=form)[name]
    options = {"norm_form": form, "damping": 100.0, "norm_damping": 1e-2, "damping_mode": mode, "solver": solver}
    _, before, after = one_step(model, x, target, **options)
    damping = 1e-2 if mode == "absolute" else ref.relative_norm_damping(1e-2, factor["F"], form)
    assert_solved(after[name], oracle_direction(factor, before[name], damping, form=form))


@pytest.mark.parametrize("kind", ["linear", "linear-2-leading", "embedding-padding", "conv2d-groups", "layer"])
def test_without_damping_directions_without_curvature_are_left_out(kind):
    """Two examples: G, or F, has rank 2 at most, and A of the vectors too."""
    model, x, target, name = make((LAYERS | NORMS)[kind])
    x, target = x[:2], target[:2]
    factors = oracle_factors(model, x, target, [name], sharing="reduce", form="full")[name]
    options = {"damping": 0.0, "norm_form": "full", "weight_sharing": "reduce"}
    _, before, after = one_step(model, x, target, **options)
    assert_solved(after[name], oracle_direction(factors, before[name], 0, form="full"))


@pytest.mark.parametrize("kind", ["conv", "norm"])
def test_without_damping_a_block_is_judged_by_its_own_scale(kind):
    """One group or channel a billion times smaller than another is solved all the same."""
    scales = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    if kind == "conv":
        model = nn.Sequential(nn.Conv1d(2, 2, 2, groups=2)).double()
        x, target = randn(8, 2, 3), randn(8, 2, 2) * scales[:, None]
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
    else:
        model = nn.Sequential(nn.GroupNorm(1, 2)).double()
        x, target = randn(8, 2, 3), randn(8, 2, 3) * scales[:, None]
        nn.init.zeros_(model[0].weight)
    factors = oracle_factors(model, x, target, ["0"])["0"]
    _, before, after = one_step(model, x, target, damping=0.0)
    expected = oracle_direction(factors, before["0"], 0)
    order = (0, 1) if kind == "conv" else (slice(0, None, 2), slice(1, None, 2))
    for block in order:
        assert_solved(after["0"][block], expected[block])


def test_damping_is_scheduled_without_being_kept_in_the_decomposition():
    """Decomposed at step 0 alone; the damping of later steps still is the one in force."""
    model, x, target, name = make(LAYERS["linear"])
    factors = oracle_factors(model, x, target, [name])[name]
    with KFAC(model, **arranged(PLAIN | {"inverse_interval": 10, "damping": lambda step: 10.0**-step})) as kfac:
        for step in range(3):
            model.zero_grad()
            (square_loss(model(x), target) / len(x)).backward()
            grad = ref.gradient_blocks(model[0]).clone()
            kfac.step()
            assert_solved(ref.gradient_blocks(model[0]), oracle_direction(factors, grad, 10.0**-step))


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_damping_never_enters_the_running_factor(solver):
    model, x, target, name = make(LAYERS["linear"])
    factors, _, _ = one_step(copy.deepcopy(model), x, target, damping=100.0, solver=solver)
    undamped, _, _ = one_step(model, x, target, damping=1e-6, solver=solver)
    for key, factor in undamped[name].items():
        assert torch.equal(factors[name][key], factor)


# Warm eigenbases


def bases(kfac, name="0"):
    saved = kfac.state_dict()["layers"][name]["decompositions"]
    return {key: (d["matrix"][0], d["values"][0]) for key, d in saved.items()}


def test_a_warm_basis_is_one_orthonormal_step_of_subspace_iteration_from_the_last():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    with KFAC(model, **(PLAIN | {"solver": "warm-eigen", "factor_decay": 0.5, "damping": 1e-3})) as kfac:
        for step in range(5):
            x, target = randn(8, 3), randn(8, 4)
            old = bases(kfac) if step else {}
            model.zero_grad()
            (square_loss(model(x), target) / 8).backward()
            grad = ref.gradient_blocks(model[0])[0].clone()
            kfac.step()
            found = {}
            for key, factor in kfac.factors()["0"].items():
                values, Q = torch.linalg.eigh(factor)
                if step:
                    # QR keeps the first column's direction: the largest eigenvalue has to come first
                    Q = torch.linalg.qr(factor @ old[key][0][:, old[key][1].argsort(descending=True)]).Q
                    values = (Q.T @ factor @ Q).diagonal()
                found[key] = Q, values
                vectors = bases(kfac)[key][0]
                assert_close(vectors.T @ vectors, torch.eye(len(factor), dtype=torch.float64))
            (Q_A, v_A), (Q_G, v_G) = found["A"], found["G"]
            expected = ref.ekfac_precondition(torch.outer(v_G, v_A), Q_A, Q_G, grad, 1e-3)
            assert_solved(ref.gradient_blocks(model[0])[0], expected)


def warm_errors(drift, passes):
    """Relative errors of warm-eigen on a batch that stays, from the eigenbasis of one that is ``drift`` away."""
    scales = 0.5 ** torch.arange(4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
    nn.init.zeros_(model[0].weight)
    x, target = randn(100, 4) * scales, randn(100, 4) * scales
    factors = oracle_factors(model, x, target, ["0"])["0"]
    errors = []
    with KFAC(model, **(PLAIN | {"solver": "warm-eigen", "factor_decay": 0.0, "damping": 1e-4})) as kfac:
        for noise in [drift] + [0.0] * passes:
            model.zero_grad()
            inputs, labels = x + noise * randn(100, 4) * scales, target + noise * randn(100, 4) * scales
            (square_loss(model(inputs), labels) / 100).backward()
            grad = ref.gradient_blocks(model[0]).clone()
            kfac.step()
            expected = oracle_direction(factors, grad, 1e-4)
            errors.append(((ref.gradient_blocks(model[0]) - expected).norm() / expected.norm()).item())
    return errors[1:]


def test_one_warm_refresh_after_a_small_drift_is_close_to_eigen():
    assert warm_errors(1e-2, 1)[0] < 3e-3
    assert warm_errors(1e-1, 1)[0] < 3e-2


def test_warm_refreshes_keep_the_basis_of_a_factor_that_does_not_change():
    assert max(warm_errors(0.0, 30)) < 1e-8


@pytest.mark.parametrize("drift", [1e-2, 0.3])
def test_each_warm_refresh_brings_the_basis_closer(drift):
    errors = warm_errors(drift, 30)
    for before, after in itertools.pairwise(errors):
        assert after < max(before, 1e-9)
    assert errors[-1] < 1e-8


# EKFAC


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "case",
    [
        lambda: (nn.Linear(3, 4), randn(8, 3)),
        lambda: (nn.Linear(3, 4, bias=False), randn(8, 5, 3)),
        lambda: (nn.Conv2d(2, 3, 2), randn(8, 2, 3, 4)),
        lambda: (nn.Conv2d(4, 6, 2, groups=2, bias=False), randn(12, 4, 3, 4)),
        LAYERS["conv1D-transposed"],
    ],
)
def test_ekfac_divides_by_the_second_moments_of_the_per_example_gradient(case, sharing):
    """At the second step, decomposed at the first: the moments are measured in the basis in use."""
    model, x, target, name = make(case)
    module = model.get_submodule(name)
    recorded = ref.per_example(model, square_loss, x, target, [name])[name]
    factors = oracle_factors(model, x, target, [name], sharing=sharing)[name]
    options = {"curvature": "ekfac", "inverse_interval": 10, "damping": 1e-3, "weight_sharing": sharing}
    with KFAC(model, **arranged(PLAIN | options)) as kfac:
        for step in range(2):
            model.zero_grad()
            (square_loss(model(x), target) / len(x)).backward()
            grad = ref.gradient_blocks(module).clone()
            kfac.step()
            if step == 0:
                assert_solved(ref.gradient_blocks(module), oracle_direction(factors, grad, 1e-3))
        saved = kfac.state_dict()["layers"][name]
    Q_A, Q_G = (saved["decompositions"][key]["matrix"] for key in ("A", "G"))
    moments = ref.ekfac_moments(ref.all_rows(module, recorded), Q_A, Q_G, len(x))
    assert_close(saved["moments"]["value"] / saved["moments"]["weight"], moments)
    expected = [ref.ekfac_precondition(*block, 1e-3) for block in zip(moments, Q_A, Q_G, grad, strict=True)]
    assert_solved(ref.gradient_blocks(module), torch.stack(expected))


def test_ekfac_keeps_kfacs_eigenvalues_for_a_module_called_twice_and_says_so():
    """The gradient of an example is the sum over the calls, which are seen one at a time."""
    model = Repeat(nn.Linear(3, 3), 2).double()
    x, target = randn(8, 3), randn(8, 2)
    factors = oracle_factors(model, x, target, ["layer"])["layer"]
    options = {"curvature": "ekfac", "inverse_interval": 10, "damping": 1e-3}
    with KFAC(model, **arranged(PLAIN | options)) as kfac, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            (square_loss(model(x), target) / 8).backward()
            grad = ref.gradient_blocks(model.layer).clone()
            kfac.step()
            assert_solved(ref.gradient_blocks(model.layer), oracle_direction(factors, grad, 1e-3))
        saved = kfac.state_dict()["layers"]
    assert float(saved["layer"]["moments"]["weight"]) == 0
    assert "moments" in saved["last"]
    assert [str(w.message).split(":")[0] for w in caught] == ["layer 'layer' is called several times per example"]
