"""spread_refresh=k: a refresh carried out over k steps decomposes each layer once, when its slice is due."""

import copy
import io
import itertools
import math
from types import SimpleNamespace

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from helpers_exact import PLAIN, assert_solved, oracle_direction, randn, square_loss
from torch import nn

from dkfac import KFAC
from dkfac.config.settings import Settings
from dkfac.decompose import refresh_scheduler
from dkfac.plan.spec import FactorSpec

SOLVERS = ["eigen", "cholesky", "warm-eigen"]
RHYTHMS = {
    "each step measured": {"factor_interval": 1, "inverse_interval": 4, "warmup_refresh": None},
    "each other step": {"factor_interval": 2, "inverse_interval": 4, "warmup_refresh": None},
    "warmup": {"factor_interval": 2, "inverse_interval": 6, "warmup_refresh": (3, 7)},
}
NUM_STEPS = 13


class Net(nn.Module):
    """Eight layers of six shapes, two of which several layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 2, groups=2)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.wide, self.back = nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(torch.tanh(self.conv(x)).mT)
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.head(torch.tanh(self.back(torch.tanh(self.wide(x)))).mean(1))


def net():
    torch.manual_seed(0)
    return Net().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 4, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(24, 2, generator=generator, dtype=torch.float64)


# The oracle: what is due when, written out


def is_measured(rhythm, step):
    """Whether a step measures factors: in the warmup in the same proportion to refreshes as later."""
    if rhythm["warmup_refresh"] is None or step >= rhythm["warmup_refresh"][1]:
        return step % rhythm["factor_interval"] == 0
    return step % (rhythm["factor_interval"] * rhythm["warmup_refresh"][0] // rhythm["inverse_interval"]) == 0


def refreshes(rhythm, num_steps):
    """Return the steps at which refreshes are due."""
    found = []
    for step in range(num_steps):
        interval = rhythm["inverse_interval"]
        if rhythm["warmup_refresh"] is not None and step < rhythm["warmup_refresh"][1]:
            interval = rhythm["warmup_refresh"][0]
        if step % interval == 0:
            found.append(step)
    return found


def steps_of_slices(step, spread, rhythm):
    """Return the steps of the refresh that a step belongs to: those that do not measure, if there are any."""
    begins = refreshes(rhythm, 60)
    begin, end = max(b for b in begins if b <= step), min(b for b in begins if b > step)
    if spread == 1:
        return [begin]
    quiet = [n for n in range(begin, end) if not is_measured(rhythm, n)]
    return (quiet or list(range(begin, end)))[:spread]


def due_at(kfac, step, spread, rhythm):
    """Return the names of the layers that a step decomposes: all at the first, for which they are new. Those are not
    decomposed again before the next refresh is due."""
    if step == 0:
        return {layer.name for layer in kfac.layers}
    if refreshes(rhythm, step + 1) == [0]:
        return set()
    steps = steps_of_slices(step, spread, rhythm)
    if step not in steps:
        return set()
    return set(cut(kfac, len(steps))[steps.index(step)])


def cut(kfac, num_slices):
    """Return the names of the layers in each slice of a model."""
    slices = refresh_scheduler.cut([layer.spec for layer in kfac.layers], num_slices)
    return [[kfac.layers[i].name for i in places] for places in slices]


@pytest.mark.parametrize("rhythm", RHYTHMS)
@pytest.mark.parametrize("spread", [1, 2, 3, 4, 9])
def test_slices_fall_on_steps_of_their_own_interval_that_do_not_measure(rhythm, spread):
    rhythm = RHYTHMS[rhythm]
    settings = Settings(spread_refresh=spread, **rhythm)
    begins = refreshes(rhythm, 60)
    for step in range(40):
        assert settings.rhythm(step) == (is_measured(rhythm, step), step in begins)
        end = min(b for b in begins if b > step)
        assert settings.refresh_steps(step) == (steps_of_slices(step, spread, rhythm), end)


def blocks_of(kfac):
    """Return the running factors with the blocks in front, on their own memory."""
    result = {}
    for layer in kfac.layers:
        factors = kfac.factors()[layer.name]
        single = {f.key for f in layer.spec.factors if f.num_blocks == 1}
        result[layer.name] = {k: (t.unsqueeze(0) if k in single else t).clone() for k, t in factors.items()}
    return result


class Warm:
    """One step of subspace iteration per decomposition, by Householder QR, block by block."""

    def __init__(self) -> None:
        self.basis, self.values = {}, {}

    def decompose(self, name, factors):
        for key, blocks in factors.items():
            for b, factor in enumerate(blocks):
                place = (name, key, b)
                if place not in self.basis:
                    values, basis = torch.linalg.eigh(factor)
                else:
                    basis = self.basis[place][:, self.values[place].argsort(descending=True)]
                    basis = torch.linalg.qr(factor @ basis).Q
                    values = (basis.T @ factor @ basis).diagonal()
                self.basis[place], self.values[place] = basis, values

    def solve(self, name, grad, damping):
        """``grad``: ``[B, O, I]``, or ``[2C]`` of a norm layer, gammas first."""
        if grad.ndim == 1:
            pairs = grad.reshape(2, -1).T
            solved = []
            for b, pair in enumerate(pairs):
                basis, values = self.basis[name, "F", b], self.values[name, "F", b]
                solved.append(basis @ ((basis.T @ pair) / (values + damping)))
            return torch.stack(solved).T.reshape(-1)
        result = []
        for b, block in enumerate(grad):
            left, right = self.basis[name, "G", b], self.basis[name, "A", b]
            curvature = torch.outer(self.values[name, "G", b], self.values[name, "A", b])
            result.append(left @ ((left.T @ block @ right) / (curvature + damping)) @ right.T)
        return torch.stack(result)


class Oracle:
    """Each layer's preconditioned gradient, from the running factors of the step at which it was last due."""

    def __init__(self, solver, damping, mode) -> None:
        self.solver, self.damping, self.mode = solver, damping, mode
        self.used, self.at, self.warm = {}, {}, Warm()

    def decompose(self, names, running, step):
        for name in names:
            self.used[name], self.at[name] = running[name], step
            self.warm.decompose(name, running[name])

    def direction(self, name, grad, step):
        factors = self.used[name]
        # Eigenbases are damped when they are used, inverses when they are made.
        damping = self.damping(self.at[name] if self.solver == "cholesky" else step)
        if self.mode == "relative" and "F" in factors:
            damping = ref.relative_norm_damping(damping, factors["F"], "unit")
        elif self.mode == "relative":
            damping = ref.relative_damping(damping, factors["A"], factors["G"])
        if self.solver == "warm-eigen":
            return self.warm.solve(name, grad, damping)
        solve = ref.factored_precondition if self.solver == "cholesky" else ref.dense_precondition
        return oracle_direction(factors, grad, damping, solve=solve)


def damping(step):
    return 0.05 * (1 + step % 3)


@pytest.mark.parametrize(
    ("solver", "spread", "rhythm", "mode"),
    [
        *(
            pytest.param(solver, spread, rhythm, "absolute", marks=() if (i + j + k) % 3 else pytest.mark.slow)
            for i, solver in enumerate(SOLVERS)
            for j, spread in enumerate((1, 3, 9))
            for k, rhythm in enumerate(RHYTHMS)
        ),
        *((solver, 3, "each other step", "relative") for solver in SOLVERS),
    ],
)
def test_each_layer_is_decomposed_on_the_factors_of_the_step_at_which_its_slice_is_due(
    monkeypatch, solver, spread, rhythm, mode
):
    if spread == 3:  # as for large layers, where those of one shape come to lie in several slices
        monkeypatch.setattr(refresh_scheduler, "_cost", lambda factors: (0.0, 1.0))
    model = net()
    options = PLAIN | RHYTHMS[rhythm] | {"factor_decay": 0.5, "damping": damping, "damping_mode": mode}
    oracle, begins = Oracle(solver, damping, mode), refreshes(RHYTHMS[rhythm], NUM_STEPS)
    times = {step: [] for step in range(NUM_STEPS)}
    with KFAC(model, solver=solver, spread_refresh=spread, **options) as kfac:
        modules = {layer.name: layer.module for layer in kfac.layers}
        assert len(modules) == 8
        if spread == 3:
            factors = {layer.name: layer.spec.factors for layer in kfac.layers}
            shapes = [{factors[name] for name in names} for names in cut(kfac, 2)]
            assert set.intersection(*shapes), "layers of one shape in both"
        for step in range(NUM_STEPS):
            model.zero_grad()
            x, target = batch(step)
            (square_loss(model(x), target) / len(x)).backward()
            before = {name: ref.gradient_blocks(module).clone() for name, module in modules.items()}
            kfac.step()
            due = due_at(kfac, step, spread, RHYTHMS[rhythm])
            times[step] = sorted(due)
            # A slice that is renewed in place holds from the next step on.
            is_late = solver != "eigen" and spread > 1 and step > 0
            oracle.decompose(set() if is_late else due, blocks_of(kfac), step)
            for name, module in modules.items():
                assert_solved(ref.gradient_blocks(module), oracle.direction(name, before[name], step), tol=1e-10)
            oracle.decompose(due if is_late else set(), blocks_of(kfac), step)
            at = {name: saved["decomposed_at"] for name, saved in kfac.state_dict()["layers"].items()}
            assert at == oracle.at
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad / (1 + parameter.grad.norm())
        assert kfac.metrics()["fallbacks_kept"] == kfac.metrics()["fallbacks_raw"] == 0
    for begin, end in itertools.pairwise(begins[1:]):
        assert sorted(name for step in range(begin, end) for name in times[step]) == sorted(modules)
    if spread == 1:
        assert all(len(names) in (0, 8) for names in times.values())
    else:
        assert all(len(names) < 8 for step, names in times.items() if step > 0)


@pytest.mark.parametrize(
    ("rhythm", "spread"), [*((rhythm, 1) for rhythm in RHYTHMS), ("each step measured", 3), ("each step measured", 9)]
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_refresh_counts_once_however_many_steps_it_takes(solver, rhythm, spread):
    model, optimizer, kfac = start(solver, rhythm, spread)
    for step in range(9):
        train(model, optimizer, step, step + 1)
        assert kfac.metrics()["refreshes"] == len(refreshes(RHYTHMS[rhythm], step + 1))


def test_a_layer_first_used_in_the_middle_of_a_refresh_is_decomposed_at_once_and_again_with_its_slice():
    model = net()
    rhythm = RHYTHMS["each step measured"]
    late = model.late = nn.Linear(4, 2).double()
    options = PLAIN | rhythm | {"damping": 0.1, "solver": "cholesky", "factor_decay": 0.5}
    with KFAC(model, spread_refresh=3, **options) as kfac:
        at, expected, slices = [], [], []
        for step in range(12):
            model.zero_grad()
            x, target = batch(step)
            output = model(x)
            if step >= 5:
                output = output + late(torch.tanh(x.mean(2)))
            (square_loss(output, target) / len(x)).backward()
            before = None if late.weight.grad is None else ref.gradient_blocks(late).clone()
            kfac.step()
            at.append(kfac.state_dict()["layers"]["late"]["decomposed_at"])
            if step < 5:
                expected.append(-1)
                continue
            begun = max(begin for begin in refreshes(rhythm, 60) if begin <= step)
            is_its_slice = "late" in due_at(kfac, step, 3, rhythm) and expected[-1] < begun
            due = step == 5 or is_its_slice
            slices.append(is_its_slice)
            if step == 5:
                used = blocks_of(kfac)["late"]
            expected.append(step if due else expected[-1])
            solved = oracle_direction(used, before, 0.1, solve=ref.factored_precondition)
            assert_solved(ref.gradient_blocks(late), solved, tol=1e-10)
            if due:  # with its slice: from the next step on
                used = blocks_of(kfac)["late"]
        assert at == expected
        assert any(slices)


# Saving and loading


def start(solver, rhythm, spread):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"announce": False, "norm_form": "unit", **RHYTHMS[rhythm]}
    return model, optimizer, KFAC(model, optimizer, solver=solver, spread_refresh=spread, **options)


def train(model, optimizer, start, stop):
    for step in range(start, stop):
        x, target = (t.float() for t in batch(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(model, optimizer, kfac):
    return through_file({"model": model.state_dict(), "opt": optimizer.state_dict(), "kfac": kfac.state_dict()})


def assert_equal(found, wanted, where="state"):
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where}.{key}")
    else:
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted, where


@pytest.mark.parametrize(("rhythm", "spread"), [("each other step", 3), ("warmup", 9)])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_run_saved_in_the_middle_of_a_refresh_is_taken_up_bitwise(solver, spread, rhythm):
    model, optimizer, kfac = start(solver, rhythm, spread)
    saved = {}
    for step in range(13):
        train(model, optimizer, step, step + 1)
        saved[step + 1] = everything(model, optimizer, kfac)
    for at in (1, 5, 6, 8, 9):
        again = start(solver, rhythm, spread)
        for part, value in zip(again, (saved[at][key] for key in ("model", "opt", "kfac")), strict=True):
            part.load_state_dict(copy.deepcopy(value))
        train(again[0], again[1], at, at + 4)
        assert_equal(dict(again[0].state_dict()), dict(saved[at + 4]["model"]), f"resumed at {at}")
        assert_equal(again[2].state_dict(), saved[at + 4]["kfac"], f"resumed at {at}")


# Slices


def square(dim, count):
    """Return ``count`` layers with square weights of size ``dim``."""
    return [SimpleNamespace(factors=(FactorSpec("A", dim), FactorSpec("G", dim)), dim=dim)] * count


MODELS = {
    "one shape": [(1024, 48)],
    "few layers": [(768, 2), (512, 1)],
    "one large": [(256, 6), (4096, 1), (256, 3)],
    "resnet": [(64, 3), (576, 3), (256, 8), (1152, 4), (512, 10), (2304, 6), (1024, 14), (4608, 3), (2048, 5)],
}


@pytest.mark.parametrize("num_slices", [1, 2, 3, 5, 8, 20, 100])
@pytest.mark.parametrize("model", MODELS)
def test_slices_cover_every_layer_once_and_are_balanced(model, num_slices):
    layers = [layer for dim, count in MODELS[model] for layer in square(dim, count)]
    slices = refresh_scheduler.cut(layers, num_slices)
    assert len(slices) == num_slices
    covered = [i for places in slices for i in places]
    assert sorted(covered) == list(range(len(layers)))
    order = [layers[i].dim for i in covered]
    assert [dim for dim, _ in itertools.groupby(order)] == list(dict.fromkeys(order)), "those of one shape are adjacent"
    # A slice pays for each shape that it begins with and for each layer; its share is exceeded by one of each at most.
    dims = {layer.dim for layer in layers}
    begin = {dim: 0.05 + 0.8 * math.ceil(dim / 256) for dim in dims}
    each = {dim: 1e-3 + 1.6e-10 * dim**3 for dim in dims}
    total = sum(begin.values()) + sum(each[layer.dim] for layer in layers)
    for places in slices:
        work = sum(begin[dim] for dim in {layers[i].dim for i in places}) + sum(each[layers[i].dim] for i in places)
        assert work <= total / num_slices + max(begin.values()) + max(each.values()) + 1e-9


@pytest.mark.parametrize("num_slices", [2, 3, 4])
def test_slices_of_equal_layers_have_about_equally_many(num_slices):
    counts = [len(places) for places in refresh_scheduler.cut(square(2048, 48), num_slices)]
    assert sum(counts) == 48
    assert max(counts) - min(counts) <= 0.25 * 48 / num_slices


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 7, 30])
def test_slices_of_a_model_cover_its_layers_once(num_slices):
    with KFAC(net(), announce=False, norm_form="unit") as kfac:
        slices = cut(kfac, num_slices)
        assert sorted(name for names in slices for name in names) == sorted(layer.name for layer in kfac.layers)
        if num_slices <= 4:
            assert all(slices)


@pytest.mark.parametrize("spread", [1, 3])
def test_randomness_of_the_user_is_left_alone(spread):
    model = net()
    with KFAC(model, spread_refresh=spread, **PLAIN | RHYTHMS["each other step"]) as kfac:
        torch.manual_seed(1)
        for step in range(5):
            model.zero_grad()
            x, target = batch(step)
            (square_loss(model(x), target) / len(x)).backward()
            kfac.step()
        found = randn(3)
    torch.manual_seed(1)
    assert torch.equal(found, randn(3))
