"""Optimizers and models inside other packages' wrappers, a GradScaler that was not named, optimizers made anew."""

import gc
import warnings

import pytest
import torch
from torch import nn

import dkfac

QUIET = {"announce": False, "factor_interval": 1, "inverse_interval": 1}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def make(optimizer="SGD"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, OPTIMIZERS[optimizer](model.parameters())


def loss_of(model, step=0):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return (model(x) - x[:, :3]).square().mean()


def assert_same(model, other):
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# --- a scaler that was not named -----------------------------------------------------------------------------


def train_scaled(kind, *, named, manual=False, half=False, **options):
    model, optimizer = make(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    kfac = dkfac.KFAC(model, optimizer, grad_scaler=scaler if named else None, **QUIET, **options)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if manual:
            scaler.unscale_(optimizer)
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
    return model, kfac


@pytest.mark.parametrize("curvature", ["adaptive", "kfac"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_scaler_that_steps_the_optimizer_is_found(kind, curvature):
    named, _ = train_scaled(kind, named=True, curvature=curvature)
    found, kfac = train_scaled(kind, named=False, curvature=curvature)
    assert_same(found, named)
    assert max(float(f["G"].abs().max()) for f in kfac.factors().values()) < 10  # without the scale of 2**8, squared


@pytest.mark.parametrize("manual", [False, True])
def test_a_scaler_is_found_in_float16_also_where_the_step_is_taken_by_hand(manual):
    named, _ = train_scaled("SGD", named=True, half=True, manual=manual)
    found, _ = train_scaled("SGD", named=False, half=True, manual=manual)
    assert_same(found, named)


def test_float16_without_any_scaler_is_refused_at_the_first_step():
    gc.collect()
    model, optimizer = make()
    dkfac.KFAC(model, optimizer, **QUIET)
    with torch.autocast("cpu", torch.float16):
        loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"layer '0' runs in float16.*grad_scaler=scaler"):
        optimizer.step()


def test_a_disabled_scaler_is_not_used():
    model, optimizer = make()
    kfac = dkfac.KFAC(model, optimizer, **QUIET)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    assert kfac.metrics()["step"] == 1


# --- wrapped optimizers and models ---------------------------------------------------------------------------


class Subclass(torch.optim.Optimizer):
    """As Accelerate's: a subclass that does not call its parent's ``__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Imitation:
    """As Lightning's and Fabric's: takes the class of what it wraps as a second base."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Imitated", (self.__class__, optimizer.__class__), {})

    optimizer = property(lambda self: self._optimizer)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Passing:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def run(model, wrapped, optimizer, wrapper=None, steps=4):
    kfac = dkfac.KFAC(wrapped, wrapper or optimizer, **QUIET)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        (wrapper or optimizer).step()
    assert kfac.metrics()["step"] == steps
    assert sorted(kfac.factors()) == ["0", "2"]
    return model


@pytest.mark.parametrize(
    "wrap",
    [Subclass, Imitation, Passing, lambda o: Passing(Subclass(o))],
    ids=["subclass", "imitation", "other", "two"],
)
def test_a_wrapped_optimizer_is_unwrapped(wrap):
    plain, optimizer = make("AdamW")
    run(plain, plain, optimizer)
    model, inner = make("AdamW")
    run(model, model, inner, wrap(inner))
    assert_same(model, plain)


class FabricLike(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = self._original_module = module

    def forward(self, x):
        return self._forward_module(x)


@pytest.mark.parametrize("wrap", [nn.DataParallel, FabricLike])
def test_a_wrapper_that_passes_calls_on_is_unwrapped(wrap):
    plain, optimizer = make()
    run(plain, plain, optimizer)
    model, inner = make()
    run(model, wrap(model), inner)
    assert_same(model, plain)


def test_a_data_parallel_over_several_devices_is_refused(monkeypatch):
    model, optimizer = make()
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0, 1]
    with pytest.raises(TypeError, match="copies the model in every forward"):
        dkfac.KFAC(wrapped, optimizer, **QUIET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_accelerate(mixed):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    getattr(accelerate.state.AcceleratorState, "_reset_state")(reset_partial_state=True)  # noqa: B009
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    model, inner = make("AdamW")
    wrapped, optimizer = accelerator.prepare(model, inner)
    assert optimizer is not inner
    kfac = dkfac.KFAC(wrapped, optimizer, **QUIET)
    losses = []
    for _ in range(20):
        loss = loss_of(wrapped)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert kfac.metrics()["step"] == 20
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_fabric():
    fabric_module = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    model, inner = make("AdamW")
    wrapped, optimizer = fabric.setup(model, inner)
    kfac = dkfac.KFAC(wrapped, optimizer, **QUIET)
    losses = []
    for _ in range(20):
        loss = loss_of(wrapped)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert kfac.metrics()["step"] == 20
    assert sorted(kfac.factors()) == ["0", "2"]
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_lightning(manual, tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = make()[0], []
            self.automatic_optimization = not manual

        def training_step(self, batch, _):
            loss = (self.net(batch[0]) - batch[0][:, :3]).square().mean()
            self.losses.append(float(loss.detach()))
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_train_start(self):
            self.kfac = dkfac.KFAC(self.net, self.optimizers(), **QUIET)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=16)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=5, default_root_dir=tmp_path, **quiet)
    model = Lit()
    trainer.fit(model, data)
    assert model.kfac.metrics()["step"] == 20
    assert model.losses[-1] < model.losses[0]


# --- an optimizer made anew ----------------------------------------------------------------------------------


def test_a_new_optimizer_over_the_same_parameters_is_noticed_at_its_first_step():
    model, optimizer = make()
    dkfac.KFAC(model, optimizer, **QUIET)
    loss_of(model).backward()
    optimizer.step()
    other = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.warns(UserWarning, match=r"Adam stepped parameters that K-FAC .* another .*\(SGD\).*close"):
        other.step()
    loss_of(model).backward()
    other.step()  # once is enough


class Outer(torch.optim.Optimizer):
    """Steps another optimizer and then does something of its own, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.mark.parametrize("which", ["inner", "outer"])
def test_an_optimizer_that_steps_another_is_not_taken_for_a_new_one(which):
    model, inner = make()
    outer = Outer(inner)
    kfac = dkfac.KFAC(model, inner if which == "inner" else outer, **QUIET)
    for step in range(3):
        outer.zero_grad()
        loss_of(model, step).backward()
        outer.step()
    assert kfac.metrics()["step"] == 3


def test_optimizers_of_other_parameters_are_nobodys_business():
    model, optimizer = make()
    other_model, other = make()
    dkfac.KFAC(model, optimizer, **QUIET)
    loss_of(other_model).backward()
    other.step()


def test_closing_the_last_one_ends_the_watch():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    before = len(hooks)
    model, optimizer = make()
    kfac = dkfac.KFAC(model, optimizer, **QUIET)
    kfac.close()
    gc.collect()
    assert len(hooks) <= before
    loss_of(model).backward()
    with warnings.catch_warnings(action="error"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_the_share_that_is_said_is_of_the_optimizers_parameters(capsys):
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dkfac.KFAC(model[0], optimizer)  # 40 of 67 parameters
    assert "1 layers with 59.7% of the parameters preconditioned, for SGD" in capsys.readouterr().err
