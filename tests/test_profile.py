"""What is chosen where a model is on a GPU and nothing is said of speed."""

import itertools

import pytest
import torch
from helpers_ranks import on_threads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dkfac import KFAC, LevenbergMarquardt, Settings, profile

CHOSEN = ("solver", "tf32", "cuda_graph", "spread_refresh")
FAST = ("cholesky", True, True, 100)
EXACT = ("eigen", False, False, 1)


def parameters(*shapes, device="cuda"):
    """Return parameters that are nowhere, but say that they are on a GPU."""
    with FakeTensorMode():
        return [torch.empty(shape, device=device) for shape in shapes or ((64, 3, 3, 3), (64,), (10, 64))]


def chosen(options=None, optimizer=torch.optim.SGD, *, given=None, world_size=1):
    options, weight = options or {}, nn.Parameter(torch.zeros(2, 2))
    settings = profile.resolve_settings(None, options, optimizer([weight], lr=0.1))
    return profile.for_device(settings, options, parameters() if given is None else given, world_size)


def speed(settings):
    return tuple(getattr(settings, name) for name in CHOSEN)


def test_on_a_gpu_steps_are_fast_without_being_asked():
    assert speed(chosen()) == FAST
    assert speed(chosen(optimizer=torch.optim.AdamW)) == ("warm-eigen", True, True, 20)
    assert speed(chosen({"factor_interval": 2, "inverse_interval": 10}, torch.optim.AdamW)) == (
        "warm-eigen",
        True,
        True,
        10,
    )


def test_elsewhere_nothing_is_changed():
    assert speed(chosen(given=parameters(device="cpu"))) == EXACT
    assert speed(chosen(given=[*parameters(), *parameters(device="cpu")])) == EXACT
    assert speed(chosen(given=[])) == EXACT


OTHERS = {
    "lag": {"inverse_lag": 5}, "staleness": {"staleness": "change"}, "ekfac": {"curvature": "ekfac"},
    "sampled": {"fisher": "sampled", "fisher_loss": "mse"}, "flattened": {"flattened": "off"},
    "schedule": {"damping": lambda step: 1e-3}, "trust": {"damping": LevenbergMarquardt(1e-3)},
    "overlap": {"overlap": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_what_it_does_not_go_with_is_left_alone(options):
    assert speed(chosen(options)) == EXACT


@pytest.mark.parametrize(("name", "value"), list(zip(CHOSEN, EXACT, strict=True)))
def test_each_is_as_it_was_given(name, value):
    settings = chosen({name: value})
    assert getattr(settings, name) == value
    assert [getattr(settings, n) for n in CHOSEN if n != name] == [
        v for n, v in zip(CHOSEN, FAST, strict=True) if n != name
    ]
    assert speed(chosen(dict(zip(CHOSEN, EXACT, strict=True)))) == EXACT


def test_settings_as_one_object_are_taken_as_they_are(monkeypatch):
    monkeypatch.setattr(profile, "for_device", lambda *_: pytest.fail("they were changed"))
    with KFAC(nn.Linear(2, 2), settings=Settings(announce=False)) as kfac:
        assert speed(kfac.settings) == EXACT


def test_several_ranks_take_what_they_share():
    assert speed(chosen(world_size=4)) == ("cholesky", True, False, 1)
    assert speed(chosen(optimizer=torch.optim.AdamW, world_size=4)) == ("warm-eigen", True, False, 1)


def test_a_layer_on_a_flattened_map_keeps_its_eigenvalues():
    assert speed(chosen(given=parameters((4096, 25088)))) == ("eigen", *FAST[1:])
    assert speed(chosen({"max_dim": 64}, given=parameters((10, 64)))) == ("eigen", *FAST[1:])
    assert speed(chosen(given=parameters((50257, 768)))) == FAST  # a vocabulary


def test_large_models_and_clipped_steps_go_without_graphs():
    assert speed(chosen(given=parameters((2**15, 2**13 - 1), (2**15,)))) == FAST
    assert speed(chosen(given=parameters((2**15, 2**13 - 1), (2**15 + 1,)))) == ("cholesky", True, False, 100)
    assert speed(chosen({"rescale": "kl-clip"})) == ("cholesky", True, False, 100)
    assert speed(chosen({"rescale": "kl-clip"}, torch.optim.AdamW)) == ("warm-eigen", True, True, 20)


PLAIN = {
    "accumulate": "sum", "announce": False, "basis_dtype": "bfloat16", "batch_dim": 1, "cluster": "h200",
    "curvature": "kfac", "damping": 0.1, "damping_mode": "relative", "factor_decay": 0.5, "factor_interval": 5,
    "inverse_interval": 50, "kl_clip": 0.1, "loss_terms": "token", "max_dim": 100, "max_failures": 3,
    "norm_damping": 0.1, "norm_form": "unit", "replicate_factors": True, "rescale": "norm", "skip": ("0",),
    "split_dim": 10, "statistics_fraction": 0.5, "strategy": "hybrid-opt", "warmup_refresh": None,
    "weight_sharing": "reduce", "wire_dtype": "bfloat16", "worker_fraction": 0.5,
}  # fmt: skip


def test_other_options_go_with_it():
    assert PLAIN.keys() == profile.PLAIN
    for name, value in PLAIN.items():
        is_for_adam = name == "basis_dtype"
        with_it = {"strategy": "hybrid-opt"} if name in ("worker_fraction", "replicate_factors") else {}
        kind = torch.optim.AdamW if is_for_adam else torch.optim.SGD
        settings = chosen({name: value, **with_it}, kind)
        assert settings.tf32, name
        assert getattr(settings, name) == value, name
        assert settings.solver == ("warm-eigen" if is_for_adam else "cholesky"), name


MORE = {"curvature": ("adam-eigen", "auto"), "rescale": ("kl-clip", "none"), "norm_form": ("full",), "tf32": (False,),
        "solver": ("eigen", "cholesky", "warm-eigen"), "cuda_graph": (True, False), "spread_refresh": (7,)}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_is_allowed_elsewhere_is_allowed_on_a_gpu(kind):
    values = [*PLAIN.items(), *((name, value) for name, others in MORE.items() for value in others)]
    weight, number = nn.Parameter(torch.zeros(2, 2)), 0
    for pair in itertools.combinations(values, 2):
        try:
            profile.resolve_settings(None, dict(pair), kind([weight], lr=0.1))
        except ValueError:
            continue
        for world_size in (1, 4):
            assert chosen(dict(pair), kind, world_size=world_size).tf32 == dict(pair).get("tf32", True), pair
        number += 1
    assert number > 400


def attach_as_if_on_a_gpu(rank):
    model = nn.Linear(2, 2)
    with KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1)) as kfac:
        return speed(kfac.settings)


def test_the_line_that_is_printed_says_it(monkeypatch, capsys):
    own = profile.for_device
    monkeypatch.setattr(profile, "for_device", lambda s, o, _, size: own(s, o, parameters(), size))
    assert attach_as_if_on_a_gpu(0) == FAST
    assert "(kfac, cholesky, tf32, cuda_graph, spread_refresh, damping 0.0003" in capsys.readouterr().err
    assert set(on_threads(2, attach_as_if_on_a_gpu)) == {("cholesky", True, False, 1)}
    assert "(kfac, cholesky, tf32, damping 0.0003" in capsys.readouterr().err
