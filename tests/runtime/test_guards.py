"""R06: a non-finite batch costs one step and nothing else."""

import copy
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dkfac import KFAC

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
EVERY_STEP = {"announce": False, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1}


def make_model(batch_norm: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3) if batch_norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 4)
    ).to(dtype)


def make_batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 1, 5, 5, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (6,), generator=generator)


def poisoned_backward(model: nn.Module, step: int, where: str, bad: float, dtype: torch.dtype) -> None:
    x, y = make_batch(step, dtype)
    if where == "input":
        x[step % 6, 0, 2, 2] = bad
    loss = F.cross_entropy(model(x), y)
    (loss * bad if where == "loss" else loss).backward()
    if where == "gradient":
        grad = list(model.parameters())[step % 5].grad
        grad.view(-1)[step % grad.numel()] = bad


def snapshot(kfac: KFAC) -> dict[str, torch.Tensor]:
    """Every tensor that outlives a step, by name."""
    found = {}
    for layer, state in kfac.state_dict()["layers"].items():
        for key, average in state["running"].items():
            found |= {f"{layer}.{key}.{part}": tensor for part, tensor in average.items()}
        for key, tensors in state["decompositions"].items():
            found |= {f"{layer}.{key}.{part}": tensor for part, tensor in tensors.items() if part != "form"}
        found |= {f"{layer}.moments.{part}": tensor for part, tensor in state.get("moments", {}).items()}
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def train(
    bad_steps: dict[int, tuple[str, float]],
    *,
    optimizer: str,
    curvature: str,
    batch_norm: bool,
    steps: int,
    as_if_absent: bool = False,
    dtype: torch.dtype = torch.float32,
):
    """Train through the bad steps, or, ``as_if_absent``, with a zero gradient and no batch in their place."""
    model = make_model(batch_norm, dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    kfac = KFAC(
        model,
        opt,
        announce=False,
        curvature=curvature,
        norm_form="unit" if batch_norm else "off",
        warmup_refresh=None,
        factor_interval=2,
        inverse_interval=8,
    )
    for step in range(steps):
        opt.zero_grad()
        if step not in bad_steps:
            x, y = make_batch(step, dtype)
            F.cross_entropy(model(x), y).backward()
        elif as_if_absent:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            poisoned_backward(model, step, *bad_steps[step], dtype)
        opt.step()
    return model, kfac


def injections(places: list[str], number: int, steps: int) -> dict[int, tuple[str, float]]:
    """Random bad steps; step 0 is left out because there the oracle has to see the model run."""
    rng = random.Random(0)
    chosen = rng.sample(range(1, steps), number)
    return {step: (rng.choice(places), rng.choice([math.nan, math.inf, -math.inf])) for step in chosen}


def assert_as_if_absent(places: list[str], number: int, steps: int, **kind) -> None:
    bad = injections(places, number, steps)
    model, kfac = train(bad, steps=steps, **kind)
    oracle_model, oracle = train(bad, steps=steps, **kind, as_if_absent=True)
    assert kfac.metrics()["skipped_batches"] == number
    assert kfac.report()["counters"]["skipped_batches"] == number
    assert oracle.metrics()["skipped_batches"] == 0
    for (name, parameter), expected in zip(model.named_parameters(), oracle_model.parameters(), strict=True):
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, expected), name
    assert_same(snapshot(kfac), snapshot(oracle))


def every_kind():
    """Each optimizer, curvature and form of the network once; their other combinations take minutes."""
    for optimizer, curvature, batch_norm in itertools.product(OPTIMIZERS, ("kfac", "ekfac"), (False, True)):
        often = (optimizer == "sgd") == (curvature == "ekfac") == batch_norm
        name = f"{optimizer}-{curvature}-{'bn' if batch_norm else 'plain'}"
        yield pytest.param(optimizer, curvature, batch_norm, id=name, marks=[] if often else pytest.mark.slow)


@pytest.mark.parametrize(("optimizer", "curvature", "batch_norm"), list(every_kind()))
def test_fifty_bad_batches_in_200_leave_the_run_as_if_they_had_not_been_there(optimizer, curvature, batch_norm):
    kind = {"optimizer": optimizer, "curvature": curvature, "batch_norm": batch_norm}
    assert_as_if_absent(["input", "loss", "gradient"], 50, 200, **kind)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", ["input", "loss", "gradient"])
def test_each_kind_of_bad_batch_leaves_the_run_as_if_it_had_not_been_there(where, optimizer):
    assert_as_if_absent([where], 10, 30, optimizer=optimizer, curvature="ekfac", batch_norm=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", ["input", "loss", "gradient"])
def test_a_bad_first_batch_is_skipped_and_the_second_one_becomes_the_factor(where, optimizer):
    model = make_model(False, torch.float64)
    opt = OPTIMIZERS[optimizer](model.parameters())
    kfac = KFAC(model, opt, **EVERY_STEP)
    before = copy.deepcopy(model.state_dict())
    poisoned_backward(model, 0, where, math.nan, torch.float64)
    opt.step()
    if optimizer == "sgd":
        assert_same(model.state_dict(), before)
    twin = copy.deepcopy(model)
    opt.zero_grad()
    x, y = make_batch(1, torch.float64)
    F.cross_entropy(model(x), y).backward()
    opt.step()

    fresh_opt = OPTIMIZERS[optimizer](twin.parameters())
    fresh = KFAC(twin, fresh_opt, **EVERY_STEP)
    F.cross_entropy(twin(x), y).backward()
    fresh_opt.step()
    found, wanted = kfac.factors(), fresh.factors()
    for layer, factors in wanted.items():
        assert_same(found[layer], factors)
    assert kfac.metrics()["skipped_batches"] == 1


def test_one_bad_micro_batch_spoils_its_step_only():
    model = make_model(False)
    opt = OPTIMIZERS["sgd"](model.parameters())
    kfac = KFAC(model, opt, accumulate="mean", curvature="kfac", **EVERY_STEP)
    for step in range(6):
        opt.zero_grad()
        for micro in range(2):
            x, y = make_batch(10 * step + micro)
            if (step, micro) == (3, 0):
                x[0, 0, 0, 0] = math.nan
            (F.cross_entropy(model(x), y) / 2).backward()
        before = snapshot(kfac) if step else {}
        opt.step()
        if step == 3:
            assert_same(snapshot(kfac), before)
    assert kfac.metrics()["skipped_batches"] == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_bad_gradient_outside_kfacs_layers_skips_the_step_too():
    model = make_model(True)
    opt = OPTIMIZERS["sgd"](model.parameters())
    kfac = KFAC(model, opt, norm_form="off", **EVERY_STEP)
    before = copy.deepcopy(dict(model.named_parameters()))
    x, y = make_batch(0)
    F.cross_entropy(model(x), y).backward()
    model[1].weight.grad[0] = math.inf
    opt.step()
    assert_same(dict(model.named_parameters()), before)
    assert kfac.metrics()["skipped_batches"] == 1


def test_a_bad_sparse_gradient_does_not_reach_its_embedding():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, opt, **EVERY_STEP)
    (model(torch.tensor([[0, 1], [2, 3]])).sum() * math.nan).backward()
    opt.step()
    assert kfac.metrics()["skipped_batches"] == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_second_moments_that_overflow_are_not_absorbed():
    """Finite factors, a finite gradient, and squared per-example gradients beyond float32."""
    layer = nn.Linear(2, 2, bias=False)
    opt = torch.optim.SGD(layer.parameters(), lr=1e-12)
    kfac = KFAC(layer, opt, curvature="ekfac", **(EVERY_STEP | {"inverse_interval": 100}))
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, -1.0]])
    for step in range(4):
        opt.zero_grad()
        size = 1e10 if step == 1 else 1.0
        sign = torch.tensor([[1.0], [-1.0], [0.0]]) if step == 1 else torch.ones(3, 1)
        (layer(x * size) * sign * size).sum().backward()
        assert layer.weight.grad.isfinite().all()
        opt.step()
        assert layer.weight.isfinite().all()
    moments = kfac.state_dict()["layers"]["Linear"]["moments"]
    assert moments["value"].isfinite().all()


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "kl-clip", "none"])
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
def test_a_gradient_where_no_curvature_was_measured_gives_a_finite_update(solver, rescale):
    """Damping 0 and G = 0: the pseudo-inverse leaves everything out, and no rescaling may divide by that."""
    layer = nn.Linear(3, 2, bias=False)
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    KFAC(layer, opt, damping=0.0, solver=solver, rescale=rescale, **(EVERY_STEP | {"inverse_interval": 100}))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for scale in (0.0, 100.0):
        opt.zero_grad()
        (layer(x) * scale).sum().backward()
        opt.step()
        assert layer.weight.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e10, 1e18])
@pytest.mark.parametrize("rescale", ["norm", "norm-global", "kl-clip", "none"])
def test_finite_batches_of_any_scale_never_make_a_parameter_non_finite(rescale, scale):
    model = make_model(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1 if scale < 1 else 1e-30)
    KFAC(model, opt, rescale=rescale, **EVERY_STEP)
    for step in range(5):
        opt.zero_grad()
        x, y = make_batch(step)
        (F.cross_entropy(model(x), y) * (scale if step % 2 else 1.0)).backward()
        opt.step()
        assert all(p.isfinite().all() for p in model.parameters()), step
