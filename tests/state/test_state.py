"""R23 (one process): a run that is saved and taken up again is the run that was never interrupted."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC

LAST = 22
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
RHYTHMS = {
    "2/4": {"factor_interval": 2, "inverse_interval": 4, "warmup_refresh": None},
    "warmup": {"factor_interval": 3, "inverse_interval": 6, "warmup_refresh": (2, 9)},
}
VARIANTS = {
    "eigen": {},
    "cholesky": {"solver": "cholesky"},
    "warm-eigen": {"solver": "warm-eigen"},
    "ekfac": {"curvature": "ekfac"},
    "kl-clip": {"rescale": "kl-clip", "damping_mode": "relative", "norm_form": "unit"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 2, groups=2)
        self.head = nn.Linear(8, 3)

    def forward(self, index):
        return self.head(torch.tanh(self.conv(self.norm(self.embed(index)).mT)).flatten(1))


KFACS = {"curvature": "kfac"}
"""Whose state is factors and decompositions alone."""


def make(optimizer="sgd", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, KFAC(model, opt, announce=False, **arranged(options))


def train(model, opt, start, stop):
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 6, (8, 3), generator=generator), torch.randint(0, 3, (8,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def checkpoint(model, opt, kfac, **how):
    parts = {"model": model.state_dict(), "opt": opt.state_dict(), "kfac": kfac.state_dict(**how)}
    return through_file(parts)


def resume(saved, **options):
    model, opt, kfac = make(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    kfac.load_state_dict(saved["kfac"])
    return model, opt, kfac


def assert_equal(found, wanted, where="state"):
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize(
    ("rhythm", "optimizer", "variant"),
    [
        *(("2/4", "sgd", variant) for variant in VARIANTS),
        *(("warmup", "sgd", variant) for variant in ("eigen", "warm-eigen")),
        *(pytest.param("2/4", "adamw", variant, marks=pytest.mark.slow) for variant in VARIANTS),
        *(pytest.param("warmup", "sgd", v, marks=pytest.mark.slow) for v in ("cholesky", "ekfac", "kl-clip")),
    ],
)
def test_resuming_at_any_step_is_bitwise_the_uninterrupted_run(rhythm, optimizer, variant):
    options = {"optimizer": optimizer, **RHYTHMS[rhythm], **VARIANTS[variant]}
    model, opt, kfac = make(**options)
    saved = {}
    for step in range(LAST):
        train(model, opt, step, step + 1)
        saved[step + 1] = checkpoint(model, opt, kfac)
    for at in range(1, 21):
        again, opt_again, kfac_again = resume(saved[at], **options)
        assert_equal(kfac_again.state_dict(), saved[at]["kfac"])
        # To the end from a few steps; from each of them across the next refresh.
        stop = LAST if at in (1, 7, 20) else min(LAST, at + 4)
        train(again, opt_again, at, stop)
        assert_equal(dict(again.state_dict()), dict(saved[stop]["model"]), f"resumed at {at}")
        assert_equal(kfac_again.state_dict(), saved[stop]["kfac"], f"resumed at {at}")


def test_counters_and_failures_in_a_row_survive_the_interruption(monkeypatch):
    """Nine failures before the save and one after it are ten in a row."""
    options = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None, "max_failures": 10}
    model, opt, kfac = make(**options)
    train(model, opt, 0, 1)
    eigh, cholesky_ex = torch.linalg.eigh, torch.linalg.cholesky_ex

    def failing_eigh(matrix):
        if matrix.shape[-1] == 9:
            raise torch.linalg.LinAlgError("failed to converge")
        return eigh(matrix)

    def failing_cholesky(matrix):
        lower, info = cholesky_ex(matrix)
        return lower, info + (matrix.shape[-1] == 9)

    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_cholesky)
    train(model, opt, 1, 10)
    again, opt_again, kfac_again = resume(checkpoint(model, opt, kfac), **options)
    assert kfac_again.metrics()["fallbacks_kept"] == 9
    assert kfac_again.metrics()["refreshes"] == 10
    with pytest.raises(RuntimeError, match="factor A of layer 'head' could not be decomposed 10 times in a row"):
        train(again, opt_again, 10, 11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_small_state_is_smaller_and_resumes_close_by(variant):
    """Factors refreshed each step make the missing decompositions the only difference, which the next step ends."""
    options = {"factor_interval": 1, "inverse_interval": 4, "warmup_refresh": None, **(KFACS | VARIANTS[variant])}
    model, opt, kfac = make(**options)
    train(model, opt, 0, 8)
    small = checkpoint(model, opt, kfac, decompositions=False)

    def size(state):
        return sum(t.numel() for t in _tensors(state["kfac"]["layers"]))

    assert size(small) < 0.6 * size(checkpoint(model, opt, kfac))
    again, opt_again, kfac_again = resume(small, **options)
    train(again, opt_again, 8, 12)
    train(model, opt, 8, 12)
    assert kfac_again.metrics()["fallbacks_raw"] == 0
    for name, parameter in model.state_dict().items():
        found = again.state_dict()[name]
        assert found.isfinite().all()
        assert (found - parameter).norm() < 0.1 * parameter.norm() + 0.05, name


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []


def test_the_small_state_is_exact_when_the_next_step_refreshes_anyway():
    options = {"factor_interval": 1, "inverse_interval": 4, "warmup_refresh": None, **KFACS}
    model, opt, kfac = make(**options)
    train(model, opt, 0, 8)
    again, opt_again, _ = resume(checkpoint(model, opt, kfac, decompositions=False), **options)
    train(again, opt_again, 8, 12)
    train(model, opt, 8, 12)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_the_state_is_tensors_numbers_and_strings():
    model, opt, kfac = make(curvature="ekfac", rescale="kl-clip", norm_form="full")
    train(model, opt, 0, 3)

    def check(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                check(item)
        else:
            assert type(value) in (torch.Tensor, int, float, str, bool), type(value)
            assert not isinstance(value, torch.Tensor) or not value.requires_grad

    state = kfac.state_dict()
    check(state)
    assert set(state["layers"]) == {layer.name for layer in kfac.layers}
    assert state["step"] == 3


def test_the_state_is_a_snapshot_that_shares_no_memory_with_the_run():
    model, opt, kfac = make(curvature="ekfac", warmup_refresh=None, factor_interval=1, inverse_interval=2)
    train(model, opt, 0, 3)
    state = kfac.state_dict()
    kept = copy.deepcopy(state)
    train(model, opt, 3, 7)
    assert_equal(state, kept)
    state, now = kfac.state_dict(), kfac.state_dict()
    for tensor in _tensors(state):
        tensor.fill_(float("nan"))
    assert_equal(kfac.state_dict(), now)
    kfac.load_state_dict(kept)
    loaded = copy.deepcopy(kept)
    train(model, opt, 7, 9)
    assert_equal(kept, loaded)
    kfac.load_state_dict(kept)
    for tensor in _tensors(kept):
        tensor.fill_(float("nan"))
    assert_equal(kfac.state_dict(), loaded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_follows_the_model_to_another_dtype(dtype):
    options = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 2, "curvature": "ekfac"}
    model, opt, kfac = make(**options)
    train(model, opt, 0, 3)
    other, opt_other, kfac_other = make(dtype=dtype, **options)
    kfac_other.load_state_dict(kfac.state_dict())
    home = torch.float64 if dtype == torch.float64 else torch.float32
    for name, factors in kfac.factors().items():
        for key, factor in factors.items():
            found = kfac_other.factors()[name][key]
            assert found.dtype == home
            torch.testing.assert_close(found, factor.to(home))
    train(other, opt_other, 3, 6)
    assert all(p.isfinite().all() for p in other.parameters())


SOLVERS = ["eigen", "cholesky", "warm-eigen", "ekfac"]


@pytest.mark.parametrize("after", SOLVERS)
@pytest.mark.parametrize("before", SOLVERS)
def test_a_state_taken_up_by_another_solver_leaves_nothing_of_the_old_one_after_a_refresh(before, after):
    """The oracle has the running factors alone. Warm-eigen and EKFAC's moments may start from an old eigenbasis."""
    rhythm = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 2}
    model, opt, kfac = make(**(rhythm | KFACS | VARIANTS[before]))
    train(model, opt, 0, 6)
    runs = []
    for how in (True, False):
        runs.append(resume(checkpoint(model, opt, kfac, decompositions=how), **(rhythm | KFACS | VARIANTS[after])))
        train(*runs[-1][:2], 6, 9)
        assert all(p.isfinite().all() for p in runs[-1][0].parameters())
    if after not in ("warm-eigen", "ekfac") or before == "cholesky":
        assert_equal(dict(runs[0][0].state_dict()), dict(runs[1][0].state_dict()))


@pytest.mark.parametrize("after", SOLVERS)
@pytest.mark.parametrize("before", SOLVERS)
def test_a_state_taken_up_by_another_solver_works_before_the_first_refresh(before, after):
    rhythm = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 100}
    model, opt, kfac = make(**rhythm, **VARIANTS[before])
    train(model, opt, 0, 3)
    again, opt_again, kfac_again = resume(checkpoint(model, opt, kfac), **rhythm, **VARIANTS[after])
    train(again, opt_again, 3, 6)
    assert all(p.isfinite().all() for p in again.parameters())
    assert kfac_again.metrics()["refreshes"] == 1
