"""Training techniques of the recipes, each against its definition written out."""

import copy
import io
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dkfac
from dkfac.tools.recipes import techniques as t


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


# --- learning rate and momentum ---------------------------------------------------------------------------------


def test_polynomial_decay_has_the_values_computed_by_hand():
    lr = t.polynomial_decay(8.0, start=2, end=10, power=2)
    assert [lr(epoch) for epoch in (0, 2, 4, 6, 8, 10, 12)] == [8.0, 8.0, 4.5, 2.0, 0.5, 0.0, 0.0]
    assert lr(4.5) == pytest.approx(8 * (5.5 / 8) ** 2)
    assert t.polynomial_decay(1.0, start=0, end=4, power=0.5)(3) == 0.5


def test_warmup_is_a_line_to_the_schedule_and_leaves_it_from_there():
    decay = t.polynomial_decay(8.0, start=4, end=12, power=1)
    lr = t.with_warmup(decay, length=4, first=0.25)
    assert [lr(epoch) for epoch in (0, 1, 2, 4)] == [2.0, 3.5, 5.0, 8.0]
    assert [lr(epoch) for epoch in (6, 8, 12)] == [decay(epoch) for epoch in (6, 8, 12)] == [6.0, 4.0, 0.0]
    assert t.with_warmup(t.polynomial_decay(8.0, start=0, end=8, power=1), length=4, first=0.5)(2) == 8 * 0.75 * 0.75


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_momentum_over_lr_stays_constant_in_every_group(tensor_lr):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    given = torch.tensor(0.4) if tensor_lr else 0.4
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.5}], lr=given, momentum=0.9)
    schedule = t.with_warmup(t.polynomial_decay(0.4, start=2, end=10, power=3), length=2)
    for epoch in (0, 0.5, 2, 3.75, 9):
        t.set_lr(optimizer, epoch, schedule, lr0=0.4, momentum0=0.9)
        for group in optimizer.param_groups:
            assert float(group["lr"]) == pytest.approx(schedule(epoch))
            assert group["momentum"] / schedule(epoch) == pytest.approx(0.9 / 0.4)
    assert (optimizer.param_groups[0]["lr"] is given) == tensor_lr  # a captured graph would still read this tensor
    t.set_lr(optimizer, 10, schedule, lr0=0.4, momentum0=0.9)
    assert optimizer.param_groups[0]["momentum"] == 0


def test_sgd_steps_with_the_momentum_it_was_given():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    lrs, buffer, expected = [1.0, 0.5, 0.25], 0.0, 0.0
    for epoch, lr in enumerate(lrs):
        t.set_lr(optimizer, epoch, lrs.__getitem__, lr0=1.0, momentum0=0.8)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        buffer = 0.8 * lr * buffer + 1
        expected -= lr * buffer
    assert weight.item() == pytest.approx(expected, rel=1e-12)


# --- weight rescaling -------------------------------------------------------------------------------------------

EXACT = 1e-30
"""An eps of the norm layers that float64 does not see: with one that it sees, the function stays only up to it."""


class Net(nn.Module):
    """Layers before norms of every kind, and layers that only look as if they were."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.stem_norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, eps=EXACT)
        self.biased, self.biased_norm = nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4, eps=EXACT)
        self.branched, self.branched_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=EXACT)
        self.bent, self.bent_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=EXACT)
        self.twice, self.norm_a, self.norm_b = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.tied, self.tied_norm = nn.Linear(4, 4), nn.LayerNorm(4, eps=EXACT)
        self.frozen, self.frozen_norm = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=EXACT)
        self.computed, self.computed_norm = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=EXACT)
        self.hidden, self.hidden_norm = nn.Linear(4, 5), nn.LayerNorm(5, eps=EXACT)
        self.holder = nn.Linear(4, 4)
        self.holder.weight = self.tied.weight
        self.frozen.requires_grad_(False)
        nn.utils.parametrizations.weight_norm(self.computed)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = F.relu(self.stem_norm(nn.Identity()(self.stem(x))), inplace=True)
        x = F.relu(self.biased_norm(self.biased(x)))
        x = self.branched(x)
        x = self.branched_norm(x) + x
        x = self.bent_norm(self.bent(x).sigmoid_())
        x = self.norm_b(self.twice(self.norm_a(self.twice(x))))
        x = x.mean((2, 3))
        x = self.holder(self.tied_norm(self.tied(x)))
        x = self.computed_norm(self.computed(self.frozen_norm(self.frozen(x))))
        return self.last(torch.tanh(self.hidden_norm(self.hidden(x))))


def net():
    model, x = Net().double(), randn(7, 3, 8, 8)
    for _ in range(3):  # running statistics that are not those of the start
        model(x)
    return model, x


def test_exactly_the_layers_that_go_straight_into_a_norm_and_nowhere_else_are_found():
    model, x = net()
    found = t.norm_followed_layers(model, x)
    assert {name: norm for name, (_, norm) in found.items()} == {
        "stem": model.stem_norm,
        "biased": model.biased_norm,
        "hidden": model.hidden_norm,
    }
    assert all(model.get_submodule(name) is layer for name, (layer, _) in found.items())


class Of(nn.Module):
    """A forward over ``a`` and ``b``, two linear layers, and ``norm``."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.way = forward

    def forward(self, x):
        return self.way(self, x)


def unused(net, x):
    net.norm(y := net.a(x))
    return y


def unused_before_another(net, x):
    net.norm(y := net.a(x))
    return net.b(y)


@torch.no_grad()
def without_grad(net, x):
    return net.a(x)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda net, x: net.norm(net.a(x)), {"a"}),
        (lambda net, x: net.norm(net.a(net.b(x))), {"a"}),
        (lambda net, x: net.a(net.norm(x)), set()),
        (lambda net, x: net.norm(net.a(x).relu()), set()),
        (lambda net, x: net.norm(net.a(x).relu_()), set()),
        (lambda net, x: net.norm(net.a(x) + net.b(x)), set()),
        (lambda net, x: net.norm(net.b(net.norm(net.a(x)))), set()),
        (lambda net, x: net.b(net.norm(without_grad(net, x))), set()),
        (unused, set()),
        (unused_before_another, set()),
    ],
)
def test_a_layer_is_found_only_where_the_norm_is_all_that_sees_its_output(forward, found):
    assert t.norm_followed_layers(Of(forward), torch.ones(3, 2)).keys() == found


def test_looking_for_layers_changes_nothing():
    model, x = net()
    model.norm_a.eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    t.norm_followed_layers(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    model.last = nn.Linear(2, 2)  # fails
    with pytest.raises(RuntimeError):
        t.norm_followed_layers(model, x)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_rescaling_keeps_the_function_and_gives_the_norm_sqrt_2_d_out(training):
    model, x = net()
    found = t.norm_followed_layers(model, x)
    before = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(model).train(training)(x)
    t.rescale_weights(found)
    for name, width in {"stem": 6, "biased": 4, "hidden": 5}.items():
        length = model.get_parameter(f"{name}.weight").square().sum().sqrt().item()
        assert length == pytest.approx(math.sqrt(2 * width), rel=1e-12)
        assert abs(before[f"{name}.weight"].norm().item() / length - 1) > 0.1, "nothing was to be done"
    torch.testing.assert_close(model.train(training)(x), expected, rtol=1e-10, atol=1e-10)
    changed = {name for name, value in model.state_dict().items() if "running" not in name and "tracked" not in name}
    changed = {name for name in changed if not torch.equal(model.state_dict()[name], before[name])}
    assert changed == {"stem.weight", "biased.weight", "biased.bias", "hidden.weight", "hidden.bias"}


def test_rescaling_again_changes_nothing_and_a_weight_of_zeros_stays():
    model, x = net()
    found = t.norm_followed_layers(model, x)
    nn.init.zeros_(model.hidden.weight)
    bias = model.hidden.bias.detach().clone()
    t.rescale_weights(found)
    once = [p.detach().clone() for p in model.parameters()]
    t.rescale_weights(found)
    for p, expected in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-14, atol=0)
    assert not model.hidden.weight.any()
    assert torch.equal(model.hidden.bias, bias)


# --- mixup, smoothing -------------------------------------------------------------------------------------------


def batches(sizes):
    for i, size in enumerate(sizes):
        yield randn(size, 2, 3, 3, seed=i), randn(size, 4, seed=100 + i).softmax(1)


def mixed_by_definition(sizes, alpha, seed):
    """Row by row: ``previous[i]`` is what was last mixed in row i."""
    draws, previous = random.Random(seed), {}
    for images, targets in batches(sizes):
        share = draws.betavariate(alpha, alpha)
        for i, new in enumerate(zip(images, targets, strict=True)):
            old = previous.get(i, new)
            previous[i] = tuple(share * a + (1 - share) * b for a, b in zip(new, old, strict=True))
        yield [torch.stack([previous[i][part] for i in range(len(images))]) for part in (0, 1)]


@pytest.mark.parametrize("sizes", [[6, 6, 6, 6, 6], [6, 6, 2, 6, 3, 6], [2, 6, 6, 4, 6]])
def test_running_mixup_follows_its_definition(sizes):
    mixup = t.RunningMixup(0.7, seed=3)
    expected = list(mixed_by_definition(sizes, 0.7, seed=3))
    for number, (given, (images, targets)) in enumerate(zip(batches(sizes), expected, strict=True)):
        got_images, got_targets = mixup(*given)
        torch.testing.assert_close(got_images, images, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(got_targets, targets, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(got_targets.sum(1), torch.ones(len(targets), dtype=torch.float64))
        assert torch.equal(got_images, given[0]) == (number == 0)


def test_writing_into_a_batch_does_not_change_the_next_one():
    outputs = []
    for spoil in (False, True):
        mixup = t.RunningMixup(seed=1)
        for images, targets in batches([4, 4, 4]):
            mixed = mixup(images, targets)
            last = [part.clone() for part in mixed]
            if spoil:
                for tensor in (images, targets, *mixed):
                    tensor.zero_()
        outputs.append(last)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_a_resumed_mixup_goes_on_bitwise():
    sizes, whole, cut = [5, 5, 3, 5, 5], t.RunningMixup(seed=7), t.RunningMixup(seed=7)
    expected = [whole(*batch) for batch in batches(sizes)]
    resumed = t.RunningMixup(seed=0)
    for i, batch in enumerate(batches(sizes)):
        if i == 3:
            file = io.BytesIO()
            torch.save(cut.state_dict(), file)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        got = (cut if i < 3 else resumed)(*batch)
        assert all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True))


def test_shares_have_the_mean_and_variance_of_beta():
    mixup, one = t.RunningMixup(0.4), torch.ones(1, 1)
    shares = []
    for _ in range(3000):
        mixup.previous = (torch.zeros(1, 1), torch.zeros(1, 1))
        shares.append(mixup(one, one)[0].item())
    shares = torch.tensor(shares)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.03)
    assert shares.var().item() == pytest.approx(0.25 / (2 * 0.4 + 1), rel=0.05)


def test_smooth_targets_and_their_cross_entropy_match_the_sums():
    labels, output = torch.tensor([2, 0, 3]), randn(3, 4)
    targets = t.soft_targets(labels, 4, smoothing=0.2).double()
    expected = torch.full((3, 4), 0.05, dtype=torch.float64)
    for row, label in enumerate(labels):
        expected[row, label] = 0.85
    torch.testing.assert_close(targets, expected, rtol=1e-6, atol=0)
    mixed = 0.3 * expected + 0.7 * expected.flip(0)
    by_hand = -sum(mixed[i, k] * output.log_softmax(1)[i, k] for i in range(3) for k in range(4)) / 3
    torch.testing.assert_close(t.soft_cross_entropy(output, mixed), by_hand)
    torch.testing.assert_close(
        t.soft_cross_entropy(output, targets), F.cross_entropy(output, labels, label_smoothing=0.2), rtol=1e-6, atol=0
    )


# --- erasing, cropping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 48)])
def test_erased_rectangles_have_the_right_share_area_shape_and_place(height, width):
    images = torch.rand(2000, 2, height, width, generator=seeded(1)) + 1
    erased = t.zero_random_erasing(images, generator=seeded(2))
    zero = erased == 0
    assert torch.equal(zero[:, 0], zero[:, 1])
    assert torch.equal(erased[~zero], images[~zero])
    hit = zero[:, 0].flatten(1).any(1)
    assert hit.float().mean().item() == pytest.approx(0.5, abs=0.03)
    rows, columns = zero[hit, 0].any(2), zero[hit, 0].any(1)
    assert torch.equal(zero[hit, 0], rows[:, :, None] & columns[:, None, :]), "not one rectangle each"
    for side in (rows, columns):
        assert (side.int().diff(dim=1).abs().sum(1) + side[:, 0] + side[:, -1] == 2).all(), "with a gap"
    h, w = rows.sum(1).double(), columns.sum(1).double()
    # Rounded to pixels: some rectangle within half a pixel of each side has an area and a shape that are allowed.
    size = height * width
    assert ((h + 0.5) * (w + 0.5) >= 0.02 * size).all()
    assert ((h - 0.5) * (w - 0.5) <= 0.25 * size).all()
    uncut = (h < height) & (w < width)
    assert ((h + 0.5) / (w - 0.5) >= 0.3)[uncut].all()
    assert ((h - 0.5) / (w + 0.5) <= 1 / 0.3)[uncut].all()
    assert (h * w / size).mean().item() == pytest.approx(0.135, abs=0.01)
    assert (h * w / size).min() < 0.03
    assert (h * w / size).max() > 0.23
    if height == width:
        assert (h / w).log().mean().item() == pytest.approx(0, abs=0.05)
        assert (h / w).log().std().item() == pytest.approx(-math.log(0.3) / math.sqrt(3), rel=0.05)
    for side in (rows, columns):  # every place is reached, both ends included
        assert side.any(0).all()
    middle = (columns.double() @ torch.arange(width, dtype=torch.float64)) / w
    assert middle.mean().item() == pytest.approx((width - 1) / 2, abs=0.04 * width)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (3, 5)])
def test_erasing_tiny_and_narrow_images_stays_inside(shape):
    images = torch.ones(200, 1, *shape)
    zeros = (t.zero_random_erasing(images, p=1, generator=seeded()) == 0).flatten(1).sum(1)
    assert zeros.min() >= 1
    assert torch.equal(t.zero_random_erasing(images, p=0, generator=seeded()), images)


def test_erasing_makes_zeros_of_what_is_not_a_number():
    images = torch.full((50, 1, 8, 8), math.nan)
    erased = t.zero_random_erasing(images, p=1, generator=seeded())
    assert (erased == 0).flatten(1).any(1).all()
    assert images.isnan().all()


@pytest.mark.parametrize(("padding", "flip"), [(4, 0.5), (2, 1.0), (0, 0.5)])
def test_crop_and_flip_match_a_loop_over_images(padding, flip):
    images = randn(90, 3, 6, 9)
    got = t.crop_and_flip(images, padding=padding, flip=flip, generator=seeded(5))
    draws = seeded(5)
    down, right = torch.randint(0, 2 * padding + 1, (2, 90, 1), generator=draws).squeeze(2).tolist()
    chance = torch.rand(90, 1, generator=draws).flatten().tolist()
    for i, image in enumerate(images):
        larger = torch.zeros(3, 6 + 2 * padding, 9 + 2 * padding, dtype=torch.float64)
        larger[:, padding : padding + 6, padding : padding + 9] = image
        expected = larger[:, down[i] : down[i] + 6, right[i] : right[i] + 9]
        assert torch.equal(got[i], expected.flip(2) if chance[i] < flip else expected)
    if padding:
        assert {*down} == {*right} == set(range(2 * padding + 1)), "the loop saw every place"


def test_the_same_generator_gives_the_same_images():
    images = randn(16, 1, 8, 8)
    for change in (t.zero_random_erasing, t.crop_and_flip):
        first, again, other = (change(images, generator=seeded(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


# --- damping ----------------------------------------------------------------------------------------------------


def test_damping_falls_as_the_two_recursions_say():
    geometric = t.damping_warmdown(1.0, 1e-4, steps=100)
    osawa = t.damping_warmdown(1.0, 1e-4, steps=100, form="osawa")
    assert [geometric(step) for step in (0, 25, 50, 100, 1000)] == pytest.approx([1, 1e-1, 1e-2, 1e-4, 1e-4])
    damping = 1.0
    for step in range(100):
        assert osawa(step) == pytest.approx(damping, rel=1e-12)
        damping = (1 - 0.08) * damping + 0.08 * 1e-4  # 2 * log10(1 / 1e-4) / 100
    assert osawa(10_000) == pytest.approx(1e-4)


def test_kfac_uses_the_damping_of_the_step():
    """With factors that are much smaller than the damping, the direction is the gradient over the damping."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    kfac = dkfac.KFAC(
        model,
        announce=False,
        rescale="none",
        warmup_refresh=None,
        factor_interval=1,
        inverse_interval=1,
        damping=t.damping_warmdown(1e8, 1e6, steps=2),
    )
    try:
        for step in range(4):
            model.zero_grad()
            model(randn(4, 3, seed=step)).square().sum(1).mean().backward()
            raw = model.weight.grad.clone()
            kfac.step()
            torch.testing.assert_close(model.weight.grad * [1e8, 1e7, 1e6, 1e6][step], raw, rtol=1e-4, atol=0)
    finally:
        kfac.close()


# --- refusals ---------------------------------------------------------------------------------------------------

PIXELS, LABELS = torch.ones(2, 1, 4, 4), torch.tensor([0, 1])


def after_another_shape():
    mixup = t.RunningMixup()
    mixup(PIXELS, torch.ones(2, 3))
    mixup(torch.ones(2, 1, 5, 5), torch.ones(2, 3))


def with_adam():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    t.set_lr(optimizer, 0, lambda epoch: 0.1, lr0=0.1, momentum0=0.9)


class Several(nn.Module):
    def forward(self, x):
        return [x, x]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t.polynomial_decay(0.1, start=3, end=3), "start < end, not .*start=3, end=3"),
        (lambda: t.polynomial_decay(-0.1, start=0, end=3), "lr > 0.*lr=-0.1"),
        (lambda: t.polynomial_decay(0.1, start=0, end=3, power=0), "power > 0.*power=0"),
        (lambda: t.with_warmup(float, length=0), "length > 0.*length=0"),
        (lambda: t.with_warmup(float, length=3, first=1.5), r"first in \[0, 1\].*first=1.5"),
        (
            lambda: t.coupled_momentum(0.2, lr0=0.1, momentum0=0.9),
            "lr=0.2 gives momentum 1.8.*lr0=0.1 must be the peak",
        ),
        (lambda: t.coupled_momentum(0.2, lr0=0, momentum0=0.9), "lr0=0 must be"),
        (with_adam, "Adam has no momentum.*use SGD"),
        (lambda: t.norm_followed_layers(Several(), PIXELS), "returns a list; wrap it"),
        (lambda: t.RunningMixup(0), "alpha=0 must be > 0"),
        (lambda: t.RunningMixup()(PIXELS, LABELS), r"torch.int64 cannot be mixed.*soft_targets"),
        (lambda: t.RunningMixup()(PIXELS.byte(), torch.ones(2, 3)), "torch.uint8 cannot be mixed; use floats"),
        (after_another_shape, r"\[2, 1, 5, 5\] follows \[2, 1, 4, 4\]; use another"),
        (lambda: t.zero_random_erasing(PIXELS, p=1.5), r"p in \[0, 1\].*p=1.5"),
        (lambda: t.zero_random_erasing(PIXELS[0]), r"\[N, C, H, W\].*not \[1, 4, 4\]"),
        (lambda: t.crop_and_flip(PIXELS[0]), r"\[N, C, H, W\].*not \[1, 4, 4\]"),
        (lambda: t.crop_and_flip(PIXELS, padding=-1), "padding >= 0.*padding=-1"),
        (lambda: t.crop_and_flip(PIXELS, flip=2), r"flip in \[0, 1\].*flip=2"),
        (lambda: t.soft_targets(LABELS, 2, smoothing=-0.1), r"smoothing=-0.1 must be in \[0, 1\]"),
        (lambda: t.damping_warmdown(1e-3, 1e-2, steps=10), "first >= last > 0.*0.001, 0.01, 10"),
        (lambda: t.damping_warmdown(1e-2, 0, steps=10), "first >= last > 0"),
        (lambda: t.damping_warmdown(1e-2, 1e-3, steps=0), "steps > 0"),
        (lambda: t.damping_warmdown(1e-2, 1e-3, steps=5, form="linear"), "form of .*'geometric', 'osawa'.*'linear'"),
        (lambda: t.damping_warmdown(1.0, 1e-4, steps=5, form="osawa"), "steps=5 are too few.*use 8"),
    ],
)
def test_bad_arguments_are_refused_with_what_would_be_right(call, message):
    with pytest.raises(ValueError, match=message):
        call()
