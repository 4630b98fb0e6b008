"""R01, R11: the factors of every layer kind are those of per-example outer products, to 1e-10 in float64."""

import copy

import pytest
import reference as ref
import torch
from helpers_exact import (
    LAYERS,
    NORMS,
    PLAIN,
    Folded,
    Repeat,
    assert_close,
    assert_factors,
    make,
    one_step,
    oracle_factors,
    randn,
    square_loss,
    token_loss,
    tokens,
)
from torch import nn

from dkfac import KFAC
from dkfac.layers import rows
from dkfac.ops import factors as ops

# torch warns about its own padded copy for "same" with an even kernel; that case is wanted here
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
SHARING = pytest.mark.parametrize("sharing", ["expand", "reduce"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Every layer kind


@SHARING
@pytest.mark.parametrize("kind", LAYERS)
def test_factors_are_those_of_per_example_outer_products(kind, sharing):
    model, x, target, name = make(LAYERS[kind])
    expected = oracle_factors(model, x, target, [name], sharing=sharing)
    assert_factors(one_step(model, x, target, weight_sharing=sharing)[0], expected)


CONVOLUTIONS = [
    (nn.Conv1d, (3, 4, 4), {"stride": 2, "padding": 2}, (3, 9)),
    (nn.Conv1d, (2, 4, 4), {"padding": "same"}, (2, 7)),
    (nn.Conv1d, (4, 4, 3), {"padding": "same", "dilation": 2, "groups": 4}, (4, 6)),
    (nn.Conv2d, (4, 6, (2, 3)), {"padding": (1, 2), "dilation": (1, 2), "groups": 2}, (4, 4, 6)),
    (nn.Conv2d, (4, 6, (2, 3)), {"padding": "same", "dilation": (1, 2), "groups": 2}, (4, 4, 5)),
    (nn.Conv2d, (2, 3, (2, 3)), {"padding": "valid", "stride": (2, 1)}, (2, 5, 4)),
    (nn.Conv2d, (3, 6, 3), {"padding": 1, "stride": 2, "groups": 3, "bias": False}, (3, 4, 5)),
    (nn.Conv3d, (2, 2, (2, 1, 3)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}, (2, 2, 2, 3)),
    (nn.Conv3d, (2, 2, 2), {"padding": "same", "groups": 2}, (2, 2, 2, 3)),
]


@SHARING
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(("kind", "args", "settings", "shape"), CONVOLUTIONS)
def test_convolutions_respect_padding_stride_dilation_and_groups(kind, args, settings, shape, mode, sharing):
    model, x, target, name = make(lambda: (kind(*args, padding_mode=mode, **settings), randn(2, *shape)))
    expected = oracle_factors(model, x, target, [name], sharing=sharing)
    assert_factors(one_step(model, x, target, weight_sharing=sharing)[0], expected)


@pytest.mark.parametrize("form", ["unit", "full", "diagonal"])
@pytest.mark.parametrize("kind", NORMS)
def test_norm_factors_are_those_of_per_example_gradients(kind, form):
    model, x, target, name = make(NORMS[kind])
    expected = oracle_factors(model, x, target, [name], form=form)
    assert_factors(one_step(model, x, target, norm_form=form)[0], expected)


@pytest.mark.parametrize("form", ["unit", "full", "diagonal"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm1d(4), (5, 4, 3)),
        (nn.BatchNorm2d(3, eps=1e-2), (5, 3, 2, 3)),
        (nn.BatchNorm3d(2), (4, 2, 2, 1, 3)),
        (nn.BatchNorm2d(3, track_running_stats=False), (5, 3, 2, 3)),
    ],
)
def test_batch_norm_factors_use_the_statistics_of_the_mode(norm, shape, training, form):
    norm = copy.deepcopy(norm)
    if norm.track_running_stats:
        norm.running_mean, norm.running_var = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5
    model, x, target, name = make(lambda: (norm.train(training), randn(*shape)))
    expected = oracle_factors(model, x, target, [name], form=form, batchwise=True)
    assert_factors(one_step(model, x, target, norm_form=form)[0], expected)


# Terms, calls


@pytest.mark.parametrize("loss_terms", ["token", 12, 5])
def test_g_counts_the_terms_that_the_setting_names_and_a_the_rows(loss_terms):
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7)).double()
    x, target = tokens(3, 4), tokens(3, 4)
    terms = 12 if loss_terms == "token" else loss_terms
    expected = oracle_factors(model, x, target, ["0", "1"], terms=terms, loss=token_loss)
    actual = one_step(model, x, target, loss=token_loss, terms=terms, loss_terms=loss_terms)[0]
    assert_factors(actual, expected)


@SHARING
@pytest.mark.parametrize("times", [0, 1, 2, 7])
@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.LayerNorm(3)])
def test_a_module_called_several_times_gives_the_rows_of_every_call(layer, times, sharing):
    model = Repeat(copy.deepcopy(layer), times).double()
    x, target = randn(5, 4, 3), randn(5, 4, 2)
    names = ["layer", "last"] if times else ["last"]
    expected = oracle_factors(model, x, target, names, sharing=sharing)
    actual, before, _ = one_step(model, x, target, weight_sharing=sharing)
    if not times:
        assert actual.pop("layer") == {}
        assert "layer" not in before
        assert model.layer.weight.grad is None
    assert_factors(actual, expected)


def test_running_averages_carry_their_weight_and_count_only_the_steps_that_used_the_layer():
    """Decay 0.7; the layer is left out at the second of four steps."""
    model = Repeat(nn.Linear(3, 3), 1).double()
    running = {"layer": {}, "last": {}}
    with KFAC(model, **(PLAIN | {"factor_decay": 0.7})) as kfac:
        for times in (2, 0, 1, 3):
            model.times = times
            x, target = randn(5, 4, 3), randn(5, 4, 2)
            bare = copy.deepcopy(model)
            names = ["layer", "last"] if times else ["last"]
            for name, factors in oracle_factors(bare, x, target, names).items():
                for key, factor in factors.items():
                    running[name][key] = ref.averaged(running[name].get(key), factor, 0.7)
            model.zero_grad()
            (square_loss(model(x), target) / 5).backward()
            kfac.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1 * torch.randn_like(p))
        saved = kfac.state_dict()["layers"]
        for name, averages in running.items():
            for key, (value, weight) in averages.items():
                assert_close(saved[name]["running"][key]["value"], value)
                assert_close(saved[name]["running"][key]["weight"].item(), weight)
        assert_factors(kfac.factors(), {n: {k: v / w for k, (v, w) in a.items()} for n, a in running.items()})


# The same numbers in another arrangement


class Sequence(nn.Module):
    """Embedding, norm and linear layers on ``[N, S]`` tokens, or on ``[S, N]``, or on ``[N * S]`` inside."""

    def __init__(self, fold=False):
        super().__init__()
        self.fold = fold
        self.embed, self.norm, self.mix, self.out = (
            nn.Embedding(7, 3, padding_idx=1),
            nn.LayerNorm(3),
            nn.Linear(3, 4),
            nn.Linear(4, 7),
        )

    def forward(self, x):
        y = self.embed(x.flatten() if self.fold else x)
        y = self.out(torch.tanh(self.mix(self.norm(y))))
        return y.unflatten(0, x.shape) if self.fold else y


@SHARING
@pytest.mark.parametrize("loss_terms", ["batch", "token"])
@pytest.mark.parametrize("arrangement", ["folded", "sequence-first", "sequence-first-folded"])
def test_folded_and_sequence_first_layers_equal_batch_first_ones(arrangement, loss_terms, sharing):
    model = Sequence().double()
    x, target = tokens(3, 5), tokens(3, 5)
    terms = 3 if loss_terms == "batch" else 15
    names = ["embed", "norm", "mix", "out"]
    expected = oracle_factors(model, x, target, names, terms=terms, sharing=sharing, loss=token_loss)
    options = {"weight_sharing": sharing, "loss_terms": loss_terms}
    model.fold = "folded" in arrangement
    if "sequence-first" in arrangement:
        x, target, options["batch_dim"] = x.T, target.T, 1
    assert_factors(one_step(model, x, target, loss=token_loss, terms=terms, **options)[0], expected)


@SHARING
@pytest.mark.parametrize("budget", [1, 2000])
def test_forming_patches_a_piece_at_a_time_changes_nothing(monkeypatch, budget, sharing):
    model, x, target, name = make(lambda: (Folded(nn.Conv2d(2, 3, 2)), randn(5, 2, 2, 3, 4)))
    expected = oracle_factors(model, x, target, [name], sharing=sharing)
    monkeypatch.setattr(rows, "PATCH_BYTES", budget)
    monkeypatch.setattr(ops, "EXAMPLE_ELEMENTS", budget)
    assert_factors(one_step(model, x, target, weight_sharing=sharing)[0], expected)


class Turned(nn.Module):
    """A layer whose output is read as it is, or transposed and partly, so that its gradient has other strides."""

    def __init__(self, layer, turn):
        super().__init__()
        self.layer, self.turn = layer, turn

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        return y.transpose(-1, -2)[..., ::2, :] if self.turn else y


LAYOUTS = {
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.mT.clone().mT,
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "strided": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "strided-inside": lambda x: x.repeat_interleave(3, dim=-1)[..., ::3],
    "expanded": lambda x: x[:1].expand(x.shape),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@SHARING
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 4), (4, 5, 3)),
        (nn.Conv2d(4, 4, 2, groups=2, padding="same", padding_mode="circular"), (4, 4, 3, 4)),
        (nn.LayerNorm(4), (4, 5, 4)),
        (nn.GroupNorm(2, 4), (4, 4, 3, 2)),
        (nn.BatchNorm2d(4), (4, 4, 3, 2)),
        (nn.Embedding(7, 3), (4, 5)),
    ],
)
def test_any_memory_layout_equals_contiguous(layer, shape, layout, turn, sharing):
    model = Turned(copy.deepcopy(layer), turn).double()
    x = LAYOUTS[layout](tokens(*shape) if isinstance(layer, nn.Embedding) else randn(*shape))
    # torch 2.13 crashes in GroupNorm's backward if a channels_last input needs no gradient, with or without K-FAC
    x.requires_grad_(x.is_floating_point())
    target = torch.randn_like(model(x)).detach()
    other = copy.deepcopy(model)
    contiguous = x.detach().clone(memory_format=torch.contiguous_format)
    if layout == "channels-last" and isinstance(layer, nn.Conv2d):
        model = model.to(memory_format=torch.channels_last)
    options = {"weight_sharing": sharing, "damping": 1e-2}
    actual, _, after = one_step(model, x, target, **options)
    expected, _, after_contiguous = one_step(other, contiguous, target, **options)
    for key, factor in expected["layer"].items():
        assert_close(actual["layer"][key], factor)
    assert_close(after["layer"], after_contiguous["layer"])


def test_a_gradient_that_is_one_number_expanded_counts_in_full():
    """The gradient of ``sum()`` has stride 0 everywhere."""
    model = nn.Sequential(nn.Linear(3, 4)).double()
    x = randn(5, 2, 3)
    loss = lambda output, _: output.sum()  # noqa: E731
    expected = oracle_factors(model, x, x, ["0"], loss=loss)
    assert_factors(one_step(model, x, x, loss=loss)[0], expected)
    assert_close(expected["0"]["G"][0], torch.full((4, 4), 2.0, dtype=torch.float64))
