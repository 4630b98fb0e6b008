"""Weights that functions apply: attention, Swin's windows, subclasses (docs/notes/014-functional-weights.md)."""

import copy
import gc
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import assert_factors, assert_same, attach, batch, mean_loss, mlp, parameters
from helpers_functional import MODELS, WHOLE, make, oracle_factors, twin
from helpers_ranks import average_gradients, on_threads
from models.sequences import Translator
from models.vision import Swin, ViT
from torch import nn
from torch.overrides import _get_current_function_mode_stack as modes
from torch.utils.checkpoint import checkpoint

import dkfac
from dkfac.layers.uses import appliers

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def measure(model, inputs, target, **options):
    kfac = attach(model, **WHOLE | options)
    model.zero_grad()
    mean_loss(model(*inputs), target).backward()
    kfac.step()
    return kfac


@pytest.mark.parametrize("kind", MODELS)
def test_factors_of_weights_that_functions_apply_equal_the_oracle(kind):
    model, inputs, target = make(kind)
    expected = oracle_factors(model, inputs, target)
    assert_factors(measure(model, inputs, target), expected)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_factors_on_several_ranks_equal_the_oracle_on_the_whole_batch(kind, strategy):
    model, inputs, target = make(kind, size=6)
    expected = oracle_factors(model, inputs, target)

    def work(rank):
        mine = copy.deepcopy(model)
        here = slice(rank * 3, rank * 3 + 3)
        kfac = attach(mine, strategy=strategy, **WHOLE)
        mean_loss(mine(*(t[here] for t in inputs)), target[here]).backward()
        average_gradients(mine)
        kfac.step()
        return kfac.factors()

    found = {}
    for factors in on_threads(2, work):
        for name, held in factors.items():
            found.setdefault(name, {}).update(held)
    assert_factors(found, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_more_than_95_percent_of_the_parameters_beside_embeddings_norms_and_head_are_preconditioned(kind):
    model, _, _ = make(kind)
    kfac = attach(model)
    ours = sum(layer.spec.grad_elements for layer in kfac.layers if layer.name != "head")
    outside = sum(p.numel() for n, p in model.named_parameters() if "head" in n or "embedding" in n or "token" in n)
    every = sum(p.numel() for p in model.parameters()) - outside
    norms = sum(p.numel() for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    assert ours / (every - norms) > 0.95
    assert not [item for item in kfac.left if "attn.in_proj" in item.name or "qkv" in item.name]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{"curvature": "kfac", "damping": 1e-2}, {"curvature": "ekfac"}, {}])
@pytest.mark.parametrize("block_dim", [None, 5])
def test_every_curvature_trains_attention(kind, options, block_dim):
    model, inputs, target = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kfac = dkfac.KFAC(model, optimizer, block_dim=block_dim, announce=False, **options)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = mean_loss(model(*inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(kfac.factors().values())
    kfac.close()


def test_preconditioned_gradients_of_attention_are_those_of_its_twin():
    model, inputs, target = make(Translator)
    copied, names = twin(model)
    settings = {"curvature": "kfac", "rescale": "none", **WHOLE}
    measure(model, inputs, target, **settings)
    measure(copied, inputs, target, **settings)
    for name, module in copied.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        mine = names.get(name, name)
        for kind in ("weight", "bias"):
            expected = getattr(module, kind).grad
            parent, _, block = mine.rpartition(".in_proj.")
            if parent:
                whole = getattr(model.get_submodule(parent), f"in_proj_{kind}").grad
                got = whole.chunk(3)["qkv".index(block)]
            else:
                got = getattr(model.get_submodule(mine), kind).grad
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_examples_are_told_apart_whichever_dimension_attention_has_them_in(batch_first, reduce):
    """Lengths and batch are equal on purpose: shapes do not tell."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=batch_first, bias=False)

        def forward(self, x):
            inner = x if batch_first else x.transpose(0, 1)
            y = self.attn(inner, inner, inner)[0]
            return y if batch_first else y.transpose(0, 1)

    torch.manual_seed(0)
    model, (x, y) = Net().double(), batch(4, 4, 4, out=4)
    copied, names = twin(model)
    sharing = "reduce" if reduce else "expand"
    found = measure(model, (x,), y, weight_sharing=sharing).factors()
    expected = measure(copied, (x,), y, weight_sharing=sharing).factors()
    assert_factors(found, {names[name]: factors for name, factors in expected.items()})


def test_attention_with_keys_of_another_width_has_a_layer_for_each_weight():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)

        def forward(self, q, k, v):
            return self.attn(q, k, v)[0]

    torch.manual_seed(0)
    model = Net().double()
    inputs = tuple(torch.randn(4, s, d, dtype=torch.float64) for s, d in ((2, 4), (3, 3), (3, 5)))
    target = torch.randn(4, 2, 4, dtype=torch.float64)
    copied, names = twin(model)
    for key in "qkv":
        getattr(copied.attn, key).bias.requires_grad_(False)
    kfac = measure(model, inputs, target)
    expected = measure(copied, inputs, target).factors()
    assert_factors(kfac, {names[name]: factors for name, factors in expected.items()})
    assert [item.name for item in kfac.left] == ["attn.in_proj_bias"]


def run_checkpointed(kind, reentrant):
    model, inputs, target = make(kind)
    for block in () if reentrant is None else model.layers if kind is ViT else model.features:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    return measure(model, inputs, target).factors()


@pytest.mark.parametrize("kind", [ViT, Swin])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_captures_each_use_once(kind, reentrant):
    found, expected = run_checkpointed(kind, reentrant), run_checkpointed(kind, None)
    assert set(found) == set(expected)
    for name, factors in expected.items():
        assert_same(found[name], factors)


class Loose(nn.Module):
    """Checkpoints a part of the forward that applies a weight: it runs again without its module's hooks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return checkpoint(lambda t: F.linear(t, self.last.weight, self.last.bias), self.first(x), use_reentrant=False)


def test_a_weight_that_is_applied_inside_a_checkpoint_of_the_forward_is_left_and_named():
    torch.manual_seed(0)
    model, (x, y) = Loose().double(), batch(6, 4)
    with pytest.warns(UserWarning, match="1 layers have gradients but .*last"):
        kfac = measure(model, (x,), y)
    assert kfac.factors()["first"]
    assert not kfac.factors()["last"]


class Scaled(nn.Linear):
    """A forward of its own that applies the weight as its base class does."""

    def forward(self, input):
        return 2 * F.linear(input, self.weight, self.bias)


class Super(nn.Linear):
    def forward(self, input):
        return super().forward(input).tanh()


class Conv(nn.Conv2d):
    def forward(self, input):
        return self._conv_forward(input, self.weight, self.bias)


class Standardized(nn.Linear):
    """Applies another tensor."""

    def forward(self, input):
        return F.linear(input, self.weight - self.weight.mean(), self.bias)


def test_subclasses_that_apply_their_weight_like_their_base_class_are_layers():
    torch.manual_seed(0)
    model = nn.Sequential(Conv(2, 3, 2), nn.Flatten(), Scaled(12, 5), Super(5, 3)).double()
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 5), Twice(), nn.Linear(5, 3), nn.Tanh()
    ).double()
    plain.load_state_dict({("4" + k[1:] if k[0] == "3" else k): v for k, v in model.state_dict().items()})
    x, y = torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected = measure(plain, (x,), y).factors()
    expected["3"] = expected.pop("4")
    assert_factors(measure(model, (x,), y), expected)


class Gate(nn.Module):
    """No subclass of a layer of torch, with one more parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.apply_weight(x) * self.scale

    def apply_weight(self, x):
        return F.linear(x, self.weight, bias=self.bias)


def test_a_module_of_ones_own_that_applies_its_weight_is_a_layer_and_its_other_parameters_are_listed():
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Gate(), nn.Linear(5, 3)).double(), batch(6, 4)
    with torch.no_grad():
        model[0].scale.mul_(2)
    plain = nn.Sequential(nn.Linear(4, 5), Twice(), nn.Linear(5, 3)).double()
    state = model.state_dict()
    del state["0.scale"]
    plain.load_state_dict({("2" + k[1:] if k[0] == "1" else k): v for k, v in state.items()})
    expected = measure(plain, (x,), y).factors()
    expected["1"] = expected.pop("2")
    kfac = measure(model, (x,), y)
    assert_factors(kfac, expected)
    assert [(item.name, item.num_parameters) for item in kfac.left] == [("0.scale", 5)]


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_subclass_that_applies_another_tensor_is_left_and_named():
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), Standardized(5, 3)).double(), batch(6, 4)
    with pytest.warns(UserWarning, match="1 layers have gradients but .*1"):
        kfac = measure(model, (x,), y)
    assert not kfac.factors()["1"]


def test_a_layer_that_is_called_and_whose_weight_is_mentioned_is_captured_once():
    class Mentioned(nn.Module):
        def __init__(self, is_applied):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.is_applied = nn.Linear(4, 3), is_applied

        def forward(self, x):
            return F.linear(x, self.layer.weight, self.layer.bias) if self.is_applied else self.layer(x)

    x, y = batch(6, 4)
    found = [measure(Mentioned(is_applied).double(), (x,), y).factors() for is_applied in (True, False)]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3)).double()
    expected = {"layer": measure(plain, (x,), y).factors()["0"]}
    assert_factors(found[0], expected)
    assert_factors(found[1], expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_with_attention_resumes_bitwise(kind):
    def start():
        model, inputs, target = make(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, inputs, target, optimizer, dkfac.KFAC(model, optimizer, announce=False)

    def steps(model, inputs, target, optimizer, number):
        for _ in range(number):
            optimizer.zero_grad()
            mean_loss(model(*inputs), target).backward()
            optimizer.step()

    model, inputs, target, optimizer, kfac = start()
    steps(model, inputs, target, optimizer, 4)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), kfac.state_dict()])
    steps(model, inputs, target, optimizer, 4)
    again, inputs, target, other, resumed = start()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    steps(again, inputs, target, other, 4)
    assert_same(parameters(again), parameters(model), tol=0)
    assert set(saved[2]["layers"]) == {layer.name for layer in kfac.layers}


def test_a_mode_is_active_inside_measured_attention_and_nowhere_else():
    model, inputs, target = make(ViT)
    kfac = attach(model, factor_interval=2, inverse_interval=2)
    seen = []
    model.layers[0].self_attention.register_forward_pre_hook(lambda *_: seen.append(len(modes())))
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(len(modes())))
    for _ in range(2):  # the second is not measured
        mean_loss(model(*inputs), target).backward()
        kfac.step()
    with torch.no_grad():
        model(*inputs)
    assert seen == [1, 0, 0, 0, 0, 0]
    kfac.close()
    model(*inputs)
    assert seen[6:] == [0, 0]


def test_a_thread_that_evaluates_the_model_meanwhile_does_not_end_the_mode():
    model, inputs, target = make(ViT)
    expected = oracle_factors(model, inputs, target)
    kfac, busy = attach(model, **WHOLE), []

    def evaluate(*_):
        if not busy:
            busy.append(threading.Thread(target=torch.no_grad()(lambda: model(*inputs))))
            busy[0].start()
            busy[0].join()

    model.layers[0].self_attention.register_forward_pre_hook(evaluate)
    mean_loss(model(*inputs), target).backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_a_forward_that_raises_leaves_no_mode_behind():
    model, _, _ = make(ViT)
    attach(model)
    with pytest.raises(AssertionError, match="was expecting embedding dimension"):
        model.layers[0].self_attention(*[torch.randn(2, 3, 5, dtype=torch.float64)] * 3)
    assert not modes()


def test_a_copy_of_the_model_trains_without_kfac_and_the_model_is_freed():
    model, inputs, target = make(ViT)
    kfac = attach(model)
    copied = copy.deepcopy(model)
    mean_loss(copied(*inputs), target).backward()
    assert not any(kfac.factors().values())
    kfac.close()
    del kfac, model
    gc.collect()


def test_autocast_keeps_the_input_as_attention_saw_it():
    torch.manual_seed(0)
    model = ViT()
    kfac = attach(model, **WHOLE)
    x = torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().sum()
    (loss / 4).backward()
    kfac.step()
    factors = kfac.factors()["layers.0.self_attention.in_proj.k"]
    assert all(torch.isfinite(f).all() for f in factors.values())
    assert factors["A"].dtype == torch.float32


def test_models_whose_layers_are_called_have_no_mode_at_all():
    for model in (
        mlp(),
        nn.TransformerEncoderLayer(4, 2).linear1,
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    ):
        assert not list(appliers(model, enumerate(model.modules())))
    layer = nn.TransformerEncoderLayer(4, 2)
    assert [type(m) for m, _ in appliers(layer, enumerate(layer.modules()))] == [nn.MultiheadAttention]
