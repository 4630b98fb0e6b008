"""What is chosen where a model is on a GPU and nothing is said of speed."""

import functools
import itertools

import pytest
import torch
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dkfac import KFAC, LevenbergMarquardt, Settings
from dkfac.config import resolve
from dkfac.tools.cli.main import main

CHOSEN = ("solver", "tf32", "cuda_graph")
FAST = ("cholesky", True, True)
EXACT = ("eigen", False, False)


@pytest.fixture
def gpu(monkeypatch):
    """Models that are taken to be on a GPU. What is chosen is then carried out on the CPU, without graphs."""
    monkeypatch.setattr(resolve, "is_on_gpu", lambda p: True)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def chosen(optimizer=torch.optim.SGD, *, given=(), scaler=None, **options):
    """Return what is chosen, after a few steps with it; with SGD for ``curvature="kfac"`` unless another is given."""
    options = ({"curvature": "kfac"} if optimizer is torch.optim.SGD else {}) | options
    optimizer = optimizer((model := build()).parameters(), **({"lr": 0.01} | dict(given)))
    with KFAC(model, optimizer, grad_scaler=scaler, **arranged({"announce": False} | options)) as kfac:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
        assert kfac.settings.spread_refresh == 1  # for one process alone, whose steps would be others
        return tuple(getattr(kfac.settings, name) for name in CHOSEN)


def test_on_a_gpu_steps_are_fast_without_being_asked(gpu):
    assert chosen() == FAST
    assert chosen(curvature="auto") == ("warm-eigen", True, True)
    assert chosen(torch.optim.RMSprop) == ("warm-eigen", True, False)  # which steps first
    assert chosen(torch.optim.AdamW) == ("warm-eigen", True, True)
    assert chosen(torch.optim.AdamW, factor_interval=2, inverse_interval=10) == ("warm-eigen", True, True)


def test_elsewhere_nothing_is_changed():
    assert chosen(curvature="auto") == chosen(torch.optim.AdamW) == ("warm-eigen", False, False)
    assert chosen() == EXACT


def test_what_is_on_a_gpu():
    with FakeTensorMode():
        assert resolve.is_on_gpu(torch.empty(2, device="cuda")) == (torch.version.hip is None)
        assert not resolve.is_on_gpu(torch.empty(2, device="cpu"))
    assert not resolve.is_on_gpu(nn.LazyLinear(2).weight)


@pytest.mark.parametrize(("name", "value"), list(zip(CHOSEN, EXACT, strict=True)))
def test_each_is_as_it_was_given(gpu, name, value):
    settings = dict(zip(CHOSEN, chosen(**{name: value}), strict=True))
    expected = dict(zip(CHOSEN, FAST, strict=True)) | {name: value}
    if name == "solver":
        expected["cuda_graph"] = False  # new decompositions each time: nothing to replay
    assert settings == expected


WITHOUT = {
    "lag": ({"inverse_lag": 5}, ("cholesky", False, False)),
    "change": ({"staleness": "change"}, ("cholesky", True, False)),
    "basis": ({"staleness": "basis"}, ("eigen", True, False)),
    "ekfac": ({"curvature": "ekfac"}, EXACT),
    "schedule": ({"damping": lambda step: 1e-3}, ("eigen", True, False)),
    "norms": ({"norm_damping": lambda step: 1e-3, "norm_form": "unit"}, ("eigen", True, False)),
    "trust": ({"damping": LevenbergMarquardt(1e-3)}, ("eigen", True, False)),
    "clip": ({"rescale": "kl-clip"}, ("cholesky", True, False)),
    "flattened": ({"flattened": {"3": 5}}, ("eigen", True, False)),
    "wide": ({"max_dim": 6}, ("eigen", True, False)),
    "overlap": ({"overlap": True}, FAST),
    "defaults": ({"staleness": "fixed", "inverse_lag": 0, "fisher": "empirical", "overlap": False}, FAST),
}


@pytest.mark.parametrize(("options", "expected"), WITHOUT.values(), ids=WITHOUT)
def test_what_does_not_go_together_is_not_chosen(gpu, options, expected):
    assert chosen(**options) == expected


def test_adams_steps_that_no_graph_can_take_go_without(gpu):
    wanted = ("warm-eigen", True, False)
    assert chosen(torch.optim.AdamW, given={"lr": torch.tensor(0.01)}) == wanted
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert chosen(torch.optim.AdamW, given={"fused": True}, scaler=scaler) == wanted
    assert chosen(torch.optim.AdamW, given={"fused": True}) == ("warm-eigen", True, True)
    assert chosen(torch.optim.AdamW, scaler=scaler) == ("warm-eigen", True, True)


def test_a_vocabulary_is_not_a_flattened_map():
    with FakeTensorMode():
        rows, columns = (torch.empty(50257, 768), torch.empty(4096, 25088))
    assert resolve.needs_no_eigenvalues(Settings(), [rows])
    assert not resolve.needs_no_eigenvalues(Settings(), [rows, columns])


def test_large_models_go_without_the_memory_of_graphs():
    settings = Settings(solver="cholesky", curvature="kfac")
    with FakeTensorMode():
        most, more = [torch.empty(2**28)], [torch.empty(2**28), torch.empty(1)]
    assert resolve.can_capture(settings, most, None, None)
    assert not resolve.can_capture(settings, more, None, None)


def test_settings_as_one_object_are_taken_as_they_are(gpu):
    with KFAC(build(), settings=Settings(announce=False)) as kfac:
        assert tuple(getattr(kfac.settings, name) for name in CHOSEN) == EXACT


def attach(rank, **options):
    model = build()
    with KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), curvature="kfac", **options) as kfac:
        return tuple(getattr(kfac.settings, name) for name in CHOSEN)


def test_several_ranks_take_what_they_share_and_the_line_that_is_printed_says_it(gpu, capsys):
    assert attach(0) == FAST
    said = capsys.readouterr().err
    assert "(kfac, cholesky, tf32, cuda_graph, damping 0.0003" in said
    assert "extra memory (graphs: up to 636 B more); keep" in said
    assert set(on_threads(2, functools.partial(attach, strategy="comm-opt"))) == {FAST}
    assert "(kfac, cholesky, tf32, cuda_graph, damping 0.0003" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["sharded", "layer-wise", "mem-opt"])
def test_ranks_that_send_each_other_updates_go_without_graphs(gpu, strategy):
    assert set(on_threads(2, functools.partial(attach, strategy=strategy))) == {("cholesky", True, False)}
    with pytest.warns(UserWarning, match=f"cuda_graph has no effect with strategy='{strategy}'"):
        on_threads(2, functools.partial(attach, strategy=strategy, cuda_graph=True))


def attach_with_settings(rank):
    with KFAC(
        build(), settings=Settings(strategy="sharded", cuda_graph=True, solver="cholesky", announce=False)
    ) as kfac:
        return kfac.settings.cuda_graph


def test_graphs_that_settings_ask_for_in_vain_are_told():
    with pytest.warns(UserWarning, match='has no effect with strategy=.sharded.: .*strategy="comm-opt"'):
        assert on_threads(2, attach_with_settings) == [False, False]


OPTIONS = {
    "curvature": ("kfac", "adam-eigen", "ekfac", "adaptive"), "rescale": ("kl-clip", "norm", "none"),
    "norm_form": ("full", "unit"),
    "solver": ("eigen", "cholesky", "warm-eigen"), "cuda_graph": (True, False), "tf32": (True, False),
    "spread_refresh": (7,), "damping": (0.1, lambda step: 0.1), "damping_mode": ("relative",), "inverse_lag": (4,),
    "inverse_backend": ("stream", "threads"), "staleness": ("change", "basis"), "fisher_loss": ("mse",),
    "fisher": ("sampled", "exact"), "overlap": (True,), "share": ("weights",), "wire_form": ("rows",),
    "block_dim": (4, None), "flattened": ("off", {"3": 5}), "basis_dtype": ("bfloat16",),
    "statistics_fraction": (0.5,), "weight_sharing": ("reduce",), "strategy": ("sharded", "local"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_is_allowed_elsewhere_is_allowed_on_a_gpu(gpu, kind):
    every = [(name, value) for name, values in OPTIONS.items() for value in values]
    model, number = build(), 0
    optimizer = kind(model.parameters(), lr=0.1)
    for options in itertools.chain(itertools.combinations(every, 2), itertools.combinations(every, 3)):
        try:
            resolve.resolve_settings(None, arranged(dict(options)), optimizer)
        except (ValueError, TypeError):
            continue
        resolve.choose_settings(None, arranged(dict(options)), model, optimizer, None, None)
        number += 1
    assert number > 5000


def test_the_doctor_expects_what_would_be_chosen(monkeypatch, capsys, tmp_path):
    source = """
from torch import nn
def small(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
def wide(): return nn.Sequential(nn.Conv2d(3, 256, 3), nn.Flatten(), nn.Linear(9216, 2))
"""
    (tmp_path / "doctored.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shape = ["--input", "16,3,8,8"]
    for arguments, expected in {
        ("doctored:small",): "cholesky", ("doctored:wide",): "eigen", ("doctored:small", "--solver", "eigen"): "eigen",
        ("doctored:small", "--cluster", "cpu-2-cores"): "eigen",
    }.items():  # fmt: skip
        assert main(["doctor", *arguments, *shape]) == 0
        assert f"every 100 steps, {expected}. This is a prediction" in capsys.readouterr().out, arguments


@pytest.mark.parametrize(
    ("rescale", "rate", "expected"),
    [("auto", 0.1, True), ("auto", torch.tensor(0.1), False), ("norm-global", torch.tensor(0.1), True)],
    ids=["number", "tensor", "tensor that is not read"],
)
def test_a_graph_of_steps_that_are_held_back_needs_rates_that_are_numbers(gpu, rescale, rate, expected):
    assert chosen(given={"lr": rate}, rescale=rescale) == ("cholesky", True, expected)


def test_a_loop_by_hand_may_be_held_back_too(gpu):
    model = build()
    with KFAC(model, rescale="norm-kl", announce=False) as kfac:
        model(torch.randn(8, 6)).square().mean().backward()
        with pytest.raises(ValueError, match=r"learning rate: call kfac.step\(lr="):
            kfac.step()
        kfac.step(lr=0.1)
        assert kfac.settings.cuda_graph
        assert kfac.metrics()["clip_factor"] <= 1.0
