"""R27: bad settings are refused before anything is hooked, with field, value and allowed range."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC, Settings
from dkfac.experimental.settings import ExperimentalSettings


def make_model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))


def num_hooks(model, optimizer):
    stores = [v for m in model.modules() for k, v in vars(m).items() if "hook" in k and isinstance(v, dict)]
    stores += [v for k, v in vars(optimizer).items() if "hook" in k and isinstance(v, dict)]
    return sum(len(store) for store in stores)


AT_LEAST_0 = ">= 0"
CHOICES = {
    "damping_mode": ("'absolute'", ["abs", "", None, 1, True]),
    "rescale": ("'kl-clip'", ["kl_clip", "Norm", None, False]),
    "basis_dtype": ("'bfloat16'", ["float16", "half", None, 16]),
    "solver": ("'cholesky'", ["eigh", "inverse", None, 3]),
    "curvature": ("'ekfac'", ["KFAC", "shampoo", None]),
    "fisher": ("'exact'", ["monte-carlo", "true", None]),
    "fisher_loss": ("'mse'", ["l1", 2]),
    "weight_sharing": ("'reduce'", ["sum", None]),
    "loss_terms": ("integer >= 1", ["tokens", 0, -3, 1.5, True, None]),
    "accumulate": ("'terms'", ["average", 2, False]),
    "norm_form": ("'diagonal'", ["2x2", None, True]),
    "strategy": ("'hybrid-opt'", ["comm_opt", "COMM-OPT", "", None, 1, True]),
    "wire_dtype": ("'bfloat16'", ["bf16", "float8", "int8", 16, True]),
    "share": ("'weights'", ["updates", None, True]),
    "wire_form": ("'rows'", ["row", None, 1]),
    "staleness": ("'basis'", ["adaptive", "", None, True]),
    "fusion": ("'optimal'", ["greedy", 0, True]),
}
NUMBERS = {
    "damping": (AT_LEAST_0, [-1e-9, -1, math.nan, math.inf, -math.inf, "1e-3", None, True, [1e-3], 1j]),
    "norm_damping": (AT_LEAST_0, [-1, math.nan, math.inf, "x", False]),
    "factor_decay": ("< 1", [-0.1, 1.0, 1, 2, math.nan, "0.9", None, True]),
    "kl_clip": ("> 0", [0, 0.0, -1e-3, math.nan, math.inf, None, "1", True]),
    "factor_interval": (">= 1", [0, -1, 1.0, 2.5, "1", None, True]),
    "inverse_interval": (">= 1", [0, -10, 100.0, "100", None, False]),
    "batch_dim": (">= 0", [-1, 0.0, "0", None, True]),
    "max_dim": (">= 1", [0, -5, 8192.0, None, "big", True]),
    "flattened": ("channels", ["yes", None, True, {"a": 1}, {"a": 2.0}, {3: 3}, ["a"]]),
    "block_dim": (">= 1", [0, -5, 2048.0, "big", True]),
    "cluster": ("dkfac measure", [3, True, ["cluster.json"]]),
    "patience": ("> 0", [0, -1, "1", float("inf"), True]),
    "max_failures": (">= 1", [0, -1, 1.5, None, True]),
    "inverse_lag": (">= 0", [-1, 0.5, None, "soon", True]),
    "staleness_threshold": ("> 0", [0, -0.1, math.nan, None, "0.1", True, abs]),
    "staleness_min_rows": (">= 1", [0, -1, 10.0, None, True]),
    "max_interval": (">= 1", [0, -1, 10.0, None, True]),
    "inverse_backend": ("'threads'", ["thread", "gpu", "", None, 1]),
    "spread_refresh": (">= 1", [0, -1, 2.5, None, True]),
    "fisher_fraction": ("<= 1", [0, -0.5, 1.5, None, "half", True]),
    "statistics_fraction": ("> 0 and <= 1", [0, -0.5, 1.5, True, "half"]),
    "tf32": ("True or False", [1, None, "yes"]),
    "cuda_graph": ("True or False", [1, None, "yes"]),
    "worker_fraction": ("> 0 and <= 1", [0, 0.0, -0.5, 1.5, math.nan, math.inf, "0.5", True]),
}
OTHERS = {
    "warmup_refresh": (
        "(every, until)",
        [
            (10,),
            (10, 100, 1),
            (0, 100),
            (10, 0),
            (10.0, 100),
            (True, 100),
            "10,100",
            {10: 100},
            False,
            1,
            0.5,
            math.nan,
            math.inf,
        ],
    ),
    "skip": ("list of layer names", ["head", [1], [None], 5, None, True]),
    "announce": ("True or False", [1, 0, "yes", None]),
    "replicate_factors": ("True or False", [1, 0, "yes", None]),
    "overlap": ("True or False", [1, "no", None]),
    "replicas_may_differ": ("True or False", [1, "no", None]),
}
BAD = [
    (field, value, allowed) for field, (allowed, values) in {**CHOICES, **NUMBERS, **OTHERS}.items() for value in values
]
TOGETHER = [
    ({"factor_interval": 10, "inverse_interval": 15}, ["inverse_interval", "15", "multiple of factor_interval", "10"]),
    ({"factor_interval": 7}, ["inverse_interval", "100", "multiple", "7"]),
    ({"factor_interval": 200}, ["inverse_interval", "100", "multiple", "200"]),
    ({"fisher": "exact"}, ["fisher_loss", "cross-entropy", "mse"]),
    ({"fisher": "sampled"}, ["fisher_loss", "bernoulli"]),
    ({"fisher_fraction": 0.5}, ["fisher_fraction", "0.5", "sampled"]),
    ({"curvature": "ekfac", "solver": "cholesky"}, ["ekfac", "cholesky", "warm-eigen"]),
    ({"wire_form": "rows", "weight_sharing": "reduce"}, ["wire_form", "expand"]),
    ({"worker_fraction": 0.5}, ["worker_fraction", "0.5", "hybrid-opt", "'auto'"]),
    ({"worker_fraction": 0.5, "strategy": "comm-opt"}, ["worker_fraction", "0.5", "hybrid-opt", "'comm-opt'"]),
    ({"worker_fraction": 0.5, "strategy": "hybrid-opt"}, ["worker_fraction", "0.5", "1 ranks", "[1]"]),
    ({"overlap": True, "wire_dtype": "float16"}, ["overlap", "float16", "bfloat16"]),
    ({"inverse_backend": "threads"}, ["inverse_backend", "inverse_lag > 0"]),
    ({"inverse_lag": 11, "warmup_refresh": (10, 100)}, ["inverse_lag", "11", "shortest", "10"]),
    ({"inverse_lag": 101}, ["inverse_lag", "101", "shortest", "100"]),
    (
        {"inverse_lag": 3, "inverse_interval": 2, "factor_interval": 1, "warmup_refresh": None},
        ["inverse_lag", "3", "2"],
    ),
    ({"inverse_lag": 3, "spread_refresh": 5}, ["inverse_lag", "spread_refresh"]),
    ({"inverse_lag": 3, "inverse_backend": "stream", "tf32": True}, ["stream", "tf32", "threads"]),
    ({"cluster": "spd-kfac-64", "strategy": "sharded"}, ["cluster", "auto", "'sharded'"]),
    ({"overlap": True, "fisher": "sampled", "fisher_loss": "mse"}, ["overlap=True", "no effect", '"sampled"']),
    ({"overlap": True, "fisher": "exact", "fisher_loss": "mse"}, ["overlap=True", "no effect", '"exact"']),
    ({"staleness_threshold": 0.2}, ["staleness_threshold=0.2", "no effect", 'staleness="change"']),
    ({"staleness_min_rows": 64}, ["staleness_min_rows=64", "no effect", 'staleness="change"']),
    ({"max_interval": 50, "staleness": "fixed"}, ["max_interval=50", "no effect", 'staleness="change"']),
]


def refuse(error, **options):
    """Check that an attachment is refused and leaves no trace; returns the message."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error) as refused:
        KFAC(model, optimizer, **arranged(options))
    assert num_hooks(model, optimizer) == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    with KFAC(model, optimizer, announce=False):
        pass
    return str(refused.value)


def test_more_than_sixty_bad_settings_are_tried():
    assert len(BAD) + len(TOGETHER) > 60
    fields = {field.name for kind in (Settings, ExperimentalSettings) for field in dataclasses.fields(kind)}
    assert {field for field, *_ in BAD} | {"experimental"} == fields


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_a_bad_value_is_refused_with_field_value_and_range(field, value, allowed):
    given = arranged({field: value})
    message = refuse((ValueError, TypeError), **given)
    assert field in message
    assert repr(value) in message
    assert allowed in message
    with pytest.raises((ValueError, TypeError)):
        Settings(**given)


@pytest.mark.parametrize(("options", "words"), TOGETHER)
def test_settings_that_do_not_go_together_are_refused(options, words):
    message = refuse(ValueError, **options)
    assert [word for word in words if word not in message] == []


def test_an_unknown_option_is_refused_naming_the_known_ones():
    message = refuse(TypeError, dampning=1e-3)
    assert "'dampning'" in message
    assert all(field.name in message for field in dataclasses.fields(Settings))


@pytest.mark.parametrize("settings", [3, {"damping": 1e-3}, "default", 1e-3])
def test_settings_of_another_type_are_refused(settings):
    message = refuse(TypeError, settings=settings)
    assert "settings" in message
    assert "Settings" in message
    assert repr(settings) in message


def test_a_settings_object_and_single_options_are_refused_together():
    message = refuse(ValueError, settings=Settings(), damping=1e-3)
    assert "settings" in message
    assert "damping" in message


def test_a_settings_object_means_the_same_as_its_fields():
    chosen = {"damping": 0.1, "solver": "cholesky", "skip": ["0"], "announce": False}
    assert KFAC(make_model(), settings=Settings(**chosen)).settings == KFAC(make_model(), **chosen).settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), ["torch.nn.Module", "int"]),
        ((make_model().parameters(),), ["torch.nn.Module", "generator"]),
        ((make_model(), "sgd"), ["torch.optim.Optimizer", "str"]),
        ((make_model(), 0.1), ["torch.optim.Optimizer", "float"]),
    ],
)
def test_wrong_arguments_are_refused_by_type(arguments, words):
    with pytest.raises(TypeError) as refused:
        KFAC(*arguments, announce=False)
    assert [word for word in words if word not in str(refused.value)] == []


def test_lbfgs_and_a_wrong_scaler_are_refused():
    model = make_model()
    with pytest.raises(TypeError, match="LBFGS"):
        KFAC(model, torch.optim.LBFGS(model.parameters()), announce=False)
    with pytest.raises(TypeError, match=r"grad_scaler must be a torch\.amp\.GradScaler, not float"):
        KFAC(model, grad_scaler=65536.0, announce=False)
    assert not any(module._forward_hooks for module in model.modules())


# --- schedules -----------------------------------------------------------------------------------------------

SCHEDULED = ["damping", "norm_damping", "factor_decay", "kl_clip"]


def train(steps, **options):
    torch.manual_seed(0)
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exact = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1, "rescale": "kl-clip"}
    kfac = KFAC(model, optimizer, announce=False, norm_form="unit", **(exact | options))
    for step in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, kfac


@pytest.mark.parametrize("field", SCHEDULED)
def test_a_constant_schedule_is_the_constant(field):
    value = {"factor_decay": 0.5, "kl_clip": 1e-9}.get(field, 1e-2)
    constant, scheduled = train(4, **{field: value})[0], train(4, **{field: lambda step: value})[0]
    assert all(torch.equal(p, q) for p, q in zip(constant.parameters(), scheduled.parameters(), strict=True))
    other = train(4, **{field: lambda step: value / (1 + step)})[0]
    assert not all(torch.equal(p, q) for p, q in zip(constant.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("field", SCHEDULED)
def test_a_schedule_is_asked_for_each_step_from_0(field):
    seen = []

    def schedule(step):
        seen.append(step)
        return 0.25

    train(5, **{field: schedule})
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]
    assert all(type(step) is int for step in seen)


@pytest.mark.parametrize(
    ("field", "bad"), [(f, b) for f in SCHEDULED for b in (-1.0, math.nan, math.inf, "1", None, True)]
)
def test_a_bad_value_from_a_schedule_is_refused_with_field_step_and_value(field, bad):
    with pytest.raises((ValueError, TypeError)) as refused:
        train(4, **{field: lambda step: bad if step == 2 else 0.25})
    assert f"{field}(2)" in str(refused.value)
    assert repr(bad) in str(refused.value)
    assert "number" in str(refused.value)


def test_norm_damping_falls_back_to_damping_scheduled_or_not():
    assert Settings(damping=lambda step: step + 1.0).at("norm_damping", 3) == 4.0
    assert Settings(damping=0.5).at("norm_damping", 3) == 0.5
    assert Settings(damping=0.5, norm_damping=lambda step: 0.1 * step).at("norm_damping", 3) == pytest.approx(0.3)


# --- rhythm --------------------------------------------------------------------------------------------------


def steps_of(settings, stop=400):
    rhythm = [settings.rhythm(step) for step in range(stop)]
    return [s for s in range(stop) if rhythm[s][0]], [s for s in range(stop) if rhythm[s][1]]


@pytest.mark.parametrize(("factor", "inverse"), [(1, 1), (1, 7), (2, 4), (10, 100), (5, 5)])
def test_without_warmup_the_rhythm_is_the_two_intervals(factor, inverse):
    settings = Settings(factor_interval=factor, inverse_interval=inverse, warmup_refresh=None)
    assert steps_of(settings) == (list(range(0, 400, factor)), list(range(0, 400, inverse)))


def test_the_default_rhythm_begins_with_every_step_and_slows_down():
    measured, decomposed = steps_of(Settings(), 900)
    early = [*range(8), 9, 11, 14, 18, 23, 29, 37, 48, 62, 80, 104, 135, 175, 227, 295]
    assert decomposed == [*early, 400, 500, 600, 700, 800]
    assert [s for s in measured if s <= 110] == [*range(80), *range(80, 104, 2), 104, 107, 110]
    assert [s for s in measured if s >= 400] == list(range(400, 900, 10))
    assert Settings().early_steps == 400


@pytest.mark.parametrize("factor", [1, 2, 5, 10])
@pytest.mark.parametrize("times", [1, 3, 10])
@pytest.mark.parametrize("ratio", [1.1, 1.3, 2, 1e9])
@pytest.mark.parametrize("lag", [0, 1, 7])
def test_refreshes_that_slow_down_end_in_the_plain_rhythm(factor, times, ratio, lag):
    inverse = factor * times
    lag = min(lag, inverse)  # more is refused
    settings = Settings(factor_interval=factor, inverse_interval=inverse, warmup_refresh=ratio, inverse_lag=lag)
    until = settings.early_steps
    stop = until + 3 * inverse
    measured, decomposed = steps_of(settings, stop)
    assert measured[0] == decomposed[0] == 0
    assert set(decomposed) <= set(measured)
    assert [s for s in measured if s >= until] == list(range(until, stop, factor))
    assert [s for s in decomposed if s >= until] == list(range(until, stop, inverse))
    gaps = [b - a for a, b in itertools.pairwise(decomposed)]
    assert all(max(1, lag) <= gap < 1.5 * inverse + lag for gap in gaps)
    assert all(b - a <= factor for a, b in itertools.pairwise(measured))
    for step in (s for s in decomposed if s < until):
        assert settings.refresh_steps(step)[0] == [step]


@pytest.mark.parametrize("factor", [1, 2, 5, 10])
@pytest.mark.parametrize("ratio", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [(1, 50), (3, 50), (10, 100), (7, 33), (1000, 50)])
def test_warmup_is_never_sparser_and_never_decomposes_without_measuring(factor, ratio, warmup):
    every, until = warmup
    settings = Settings(factor_interval=factor, inverse_interval=factor * ratio, warmup_refresh=warmup)
    plain = dataclasses.replace(settings, warmup_refresh=None)
    (measured, decomposed), (plain_measured, plain_decomposed) = steps_of(settings), steps_of(plain)
    assert measured[0] == decomposed[0] == 0
    assert set(decomposed) <= set(measured)
    assert [s for s in measured if s >= until] == [s for s in plain_measured if s >= until]
    assert [s for s in decomposed if s >= until] == [s for s in plain_decomposed if s >= until]
    early = [s for s in decomposed if s < until]
    gaps = {b - a for a, b in itertools.pairwise(early)}
    assert all(gap <= min(every, factor * ratio) for gap in gaps)
    assert len([s for s in measured if s < until]) >= len([s for s in plain_measured if s < until])


# --- skip, max_dim, the object -------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [["0"], ("0",), ["[0]"], ["?"], ["*"]])
def test_skip_takes_names_and_patterns(skip):
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))
    if skip == ["*"]:
        with pytest.raises(ValueError, match=r"skip='\*'"):
            KFAC(model, announce=False, skip=skip)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return
    kfac = KFAC(model, announce=False, skip=skip)
    assert [layer.name for layer in kfac.layers] == ["1.0"]
    assert [(item.name, item.reason) for item in kfac.left] == [("0", f"skip={skip[0]!r}")]


def test_a_skip_pattern_that_matches_nothing_is_refused_naming_the_layers():
    message = refuse(ValueError, skip=["0", "heads.*"])
    assert "heads.*" in message
    assert "'0'" not in message
    assert "3" in message


def test_max_dim_leaves_a_layer_to_the_optimizer_and_names_it():
    kfac = KFAC(make_model(), announce=False, max_dim=4, norm_form="unit")
    assert [layer.name for layer in kfac.layers] == ["1", "3"]
    assert [(item.name, item.reason) for item in kfac.left] == [("0", "A of dim 5 > max_dim=4")]
    assert "A of dim 5 > max_dim=4" in str(kfac)


def test_settings_are_frozen():
    settings = Settings(skip=["a"], warmup_refresh=[5, 50])
    assert settings.skip == ("a",)
    assert settings.warmup_refresh == (5, 50)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.damping = 1.0
    assert hash(settings) == hash(Settings(skip=("a",), warmup_refresh=(5, 50)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"damping": lambda step: 0.1, "skip": ["a", "b*"], "warmup_refresh": None},
        {"damping": lambda step: 0.1, "experimental": {"overlap": True, "flattened": {"a": 2}}},
    ],
)
def test_describe_is_json_and_builds_the_same_settings(options):
    settings = Settings(**options)
    plain = json.loads(json.dumps(settings.describe(), allow_nan=False))
    assert plain.keys() == {field.name for field in dataclasses.fields(Settings)}
    if options:
        assert plain["damping"] == "<function>"
        plain["damping"] = settings.damping
    assert Settings(**plain) == settings


# --- experimental settings, and the keywords that they had ------------------------------------------------------

OLD = {
    "staleness": "change", "wire_form": "rows", "overlap": True, "fusion": "spd", "replicate_factors": True,
    "basis_dtype": "bfloat16", "norm_form": "full", "flattened": {"3": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_an_old_keyword_still_works_and_says_where_it_is_now(name):
    with pytest.warns(FutureWarning, match=rf"experimental=\{{'{name}': "):
        old = Settings(**{name: OLD[name]})
    assert old == Settings(experimental={name: OLD[name]})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(FutureWarning, match="experimental") as warned:
        kfac = KFAC(model, optimizer, announce=False, **{name: OLD[name]})
    assert getattr(kfac.settings.experimental, name) == OLD[name]
    kfac.close()
    assert len([w for w in warned if w.category is FutureWarning]) == 1


def test_replace_takes_an_old_keyword_and_keeps_the_other_experimental_settings():
    settings = Settings(experimental={"fusion": "spd"})
    with pytest.warns(FutureWarning, match="overlap"):
        settings = dataclasses.replace(settings, overlap=True)
    assert settings.experimental == ExperimentalSettings(fusion="spd", overlap=True)


def test_experimental_settings_are_a_dict_or_an_object():
    assert Settings(experimental={"overlap": True}) == Settings(experimental=ExperimentalSettings(overlap=True))
    with pytest.raises(TypeError, match=r"'overlaps'.*there are .*overlap"):
        Settings(experimental={"overlaps": True})
    with pytest.raises(ValueError, match="experimental=3 is not a dict"):
        Settings(experimental=3)
    with pytest.raises(ValueError, match="overlap is given twice"), pytest.warns(FutureWarning):
        Settings(overlap=True, experimental={"overlap": False})


@pytest.mark.parametrize("name", ["norm_form", "flattened"])
def test_a_joint_form_and_a_mapping_are_experimental_and_the_other_values_are_not(name):
    assert getattr(Settings(**{name: "off"}), name) == "off"
    assert getattr(Settings().experimental, name) is None
