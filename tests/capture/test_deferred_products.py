"""Layers of one shape that do not all run alike, sums that wait, samples with masks: faults that were once there."""

import pytest
import torch
from torch import nn

import dkfac
from dkfac.capture import calls, deferred_products


class Two(nn.Module):
    """Two layers of one shape, of which a step runs those it is told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x, which):
        return sum(getattr(self, name)(x) for name in which)


def grad_norm(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


@pytest.mark.parametrize("order", ["ab b a ab ab", "b a ab ab", "ab a b ab", "a ab b ab"])
def test_layers_that_are_left_out_by_turns_keep_the_length_of_the_step(order):
    torch.manual_seed(0)
    model = Two().double()
    with dkfac.KFAC(model, announce=False, factor_interval=1, inverse_interval=1, warmup_refresh=None) as kfac:
        for which in order.split():
            model.zero_grad()
            model(torch.randn(6, 4, dtype=torch.float64), which).square().mean().backward()
            raw = grad_norm(model)
            kfac.step()
            torch.testing.assert_close(grad_norm(model), raw)
            assert kfac.metrics()["grad_norm"] == pytest.approx(float(raw))


def test_a_batch_of_padding_alone_is_skipped_and_leaves_the_factors_finite():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2)).double()
    with dkfac.KFAC(model, announce=False, factor_interval=1, inverse_interval=1, loss_terms="token") as kfac:
        for index in (torch.randint(1, 5, (4, 3)), torch.zeros(4, 3, dtype=torch.long), torch.randint(1, 5, (4, 3))):
            model.zero_grad()
            model(index).square().mean().backward()
            kfac.step()
            assert all(f.isfinite().all() for layer in kfac.factors().values() for f in layer.values())
        assert kfac.metrics()["skipped_batches"] == 1


def test_a_mask_without_a_position_is_a_batch_to_skip():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    with dkfac.KFAC(model, announce=False, factor_interval=1, inverse_interval=1) as kfac:
        for keep in (1, 0, 1):
            model.zero_grad()
            kfac.set_terms(4, mask=torch.full((4, 5), bool(keep)))
            model(torch.randn(4, 5, 3, dtype=torch.float64)).square().mean().backward()
            kfac.step()
            assert all(f.isfinite().all() for layer in kfac.factors().values() for f in layer.values())
        assert kfac.metrics()["skipped_batches"] == 1


def test_a_model_converted_after_attaching_and_before_its_first_step_is_measured_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with dkfac.KFAC(model, announce=False) as kfac:
        model.double()
        model(torch.randn(6, 3, dtype=torch.float64)).square().mean().backward()
        kfac.step()
        assert {f.dtype for layer in kfac.factors().values() for f in layer.values()} == {torch.float64}


class Scale(torch.autograd.Function):
    """Changes the gradient it is handed, which autograd forbids and some code does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.mul_(-0.1)


def test_a_gradient_that_is_changed_behind_a_layers_back_is_noticed_once_and_then_measured_at_once():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            other = Scale.apply(self.second(x))
            return (self.first(x) + other).square()

    model = Branches()
    with dkfac.KFAC(model, announce=False, factor_interval=1, inverse_interval=1, warmup_refresh=None) as kfac:
        x = torch.randn(5, 4, dtype=torch.float64)

        def step():
            model.zero_grad()
            model(x).mean().backward()
            kfac.step()

        with pytest.warns(UserWarning, match="was changed in place after its backward"):
            step()
        assert kfac.factors() == {"first": {}, "second": {}}
        step()
        with torch.no_grad():
            output = first(x) + second(x)
        g = 2 * output / output.numel() * len(x)
        expected = g.mT @ g / len(x)
        torch.testing.assert_close(kfac.factors()["first"]["G"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "shape"), [(nn.Conv2d, (8, 2, 6, 6)), (nn.Conv1d, (8, 2, 6))])
def test_a_mask_that_keeps_everything_changes_nothing_in_a_sample_of_a_convolution(kind, shape):
    found = []
    for mask in (None, torch.ones(shape[0], *shape[2:], dtype=torch.bool)):
        torch.manual_seed(0)
        model = nn.Sequential(kind(2, 3, 3, padding=1)).double()
        with dkfac.KFAC(model, announce=False, statistics_fraction=0.5) as kfac:
            kfac.set_terms(8, mask=mask)
            model(torch.randn(shape, dtype=torch.float64)).square().mean().backward()
            kfac.step()
            found.append(kfac.factors()["0"]["A"])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


# Layers with one input


class Attention(nn.Module):
    """Three layers of one input, as queries, keys and values are made; ``change`` it in place after the first."""

    def __init__(self, change=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5, bias=False)
        self.head, self.change = nn.Linear(5, 2), change

    def forward(self, x):
        x = torch.tanh(x)
        q = self.q(x.clone() if self.change else x)
        x = x.mul_(2) if self.change else x
        mixed = torch.softmax(q @ self.k(x).mT, -1) @ self.v(x)
        return self.head(mixed.mean(1))


@pytest.mark.parametrize("change", [False, True])
def test_layers_with_the_same_input_share_its_products(change, monkeypatch):
    monkeypatch.setattr(deferred_products, "BATCHED_BYTES", 1)
    torch.manual_seed(0)
    model = Attention(change).double()
    x, y = torch.randn(6, 3, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    products, real = [], calls.gram_of_rows

    def counted(rows, **options):
        products.append(rows.shape[1] + options["ones"])
        return real(rows, **options)

    monkeypatch.setattr(calls, "gram_of_rows", counted)
    with dkfac.KFAC(model, announce=False, factor_decay=0.5) as kfac:
        for _ in range(2):  # twice: sums must not be shared with what is done to them
            products.clear()
            model.zero_grad()
            (model(x) - y).square().sum(1).mean().backward()
            kfac.step()
        rows = torch.tanh(x).reshape(-1, 4)
        seen = {"q": rows, "k": rows * (2 if change else 1), "v": rows * (2 if change else 1)}
        for name, a in seen.items():
            a = torch.cat([a, a.new_ones(len(a), 1)], 1) if name != "v" else a
            expected = a.mT @ a / len(a)
            torch.testing.assert_close(kfac.factors()[name]["A"], expected, rtol=1e-12, atol=1e-12)
    inputs = {"q and k": 5, "v": 4}  # features, with the one for the bias; gradients have 5 and 2
    assert products.count(inputs["v"]) == 1
    assert products.count(inputs["q and k"]) - 3 == (2 if change else 1)


class Mixer(nn.Module):
    """``k`` is called twice on the input that ``q`` has, and ``low`` in another precision."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.low = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        x = torch.tanh(x)
        y = self.q(x) + self.k(x) * self.k(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.low(x)
        return self.head((y + low.float()).mean(1))


def test_a_shared_input_is_neither_added_to_nor_of_another_precision(monkeypatch):
    monkeypatch.setattr(deferred_products, "BATCHED_BYTES", 0)
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(6, 3, 4)
    with dkfac.KFAC(model, announce=False) as kfac:
        model(x).square().sum(1).mean().backward()
        kfac.step()
        rows = torch.tanh(x).reshape(-1, 4)
        for name, a in {"q": rows, "k": rows, "low": rows.bfloat16().float()}.items():
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            torch.testing.assert_close(kfac.factors()[name]["A"], a.mT @ a / len(a), rtol=1e-6, atol=1e-6)


def test_a_step_whose_inputs_were_overwritten_counts_for_nothing(monkeypatch):
    """Not half of it: the passes that follow are of the same step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with dkfac.KFAC(model, announce=False, factor_interval=1, accumulate="mean", factor_decay=0.5) as kfac:
        x = torch.randn(8, 3)
        with monkeypatch.context() as patch:
            patch.setattr(kfac._collector.deferred, "flush", lambda: None)  # as in the pass
            (model(x).square().mean() / 2).backward()
        with torch.no_grad():
            x.mul_(3)
        with pytest.warns(UserWarning, match="changed in place"):
            kfac._collector.deferred.flush()
        (model(torch.randn(8, 3)).square().mean() / 2).backward()
        kfac.step()
        assert not kfac.factors()["0"]
        model.zero_grad()
        good = torch.randn(8, 3)
        model(good).square().mean().backward()
        kfac.step()
        a = torch.cat([good, good.new_ones(8, 1)], 1)
        torch.testing.assert_close(kfac.factors()["0"]["A"], a.mT @ a / 8, rtol=1e-5, atol=1e-6)


def test_a_pass_whose_sums_fail_leaves_nothing_behind(monkeypatch):
    """Out of memory in the last sum: a loop that drops the batch and goes on must not count half of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    good = torch.randn(8, 3)
    with dkfac.KFAC(model, announce=False, factor_interval=1) as kfac:
        real, calls = deferred_products.DeferredProducts._give, []

        def fails(self, *given):
            calls.append(given)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no room")
            real(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(deferred_products.DeferredProducts, "_give", fails)
            with pytest.raises(torch.OutOfMemoryError):
                model(100 * torch.randn(8, 3)).square().mean().backward()
        model.zero_grad()
        model(good).square().mean().backward()
        kfac.step()
        a = torch.cat([good, good.new_ones(8, 1)], 1)
        torch.testing.assert_close(kfac.factors()["0"]["A"], a.mT @ a / 8, rtol=1e-5, atol=1e-6)


def test_batches_of_ever_new_sizes_leave_no_trace(monkeypatch):
    monkeypatch.setattr(deferred_products, "MOST_KINDS", 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with dkfac.KFAC(model, announce=False, factor_interval=1) as kfac:
        for size in range(2, 40):
            model.zero_grad()
            kfac.set_terms(size + 0.5)
            model(torch.randn(size, 3)).square().mean().backward()
            kfac.step()
        assert len(kfac._collector.deferred._kinds) <= 10
