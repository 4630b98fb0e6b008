"""No host synchronisation in ordinary and factor steps: nothing reads a tensor's value or moves it between devices.

On a CPU there is no device to wait for, but each such read passes through a dispatcher call that a spy can see.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dkfac import KFAC

READS = {
    "aten::_local_scalar_dense",  # item(), float(), int(), bool(), a branch on a tensor, a slice by a tensor
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",  # also indexing by a boolean mask
    "aten::nonzero_numpy",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
    "aten::_linalg_eigh",
    "aten::linalg_qr",
}
READ_METHODS = ("cpu", "numpy", "tolist", "item")
UPLOADS = ("tensor", "as_tensor", "from_numpy")


class Spy(TorchDispatchMode):
    """Notes the operations that would make the host wait for a device.

    Some leave no trace below Python when there is one device, so those functions are replaced meanwhile. A tensor
    made with ``device="cpu"`` in so many words lives on the host, also beside a GPU, and may be read.
    """

    def __init__(self):
        super().__init__()
        self.seen = []
        self.on_host = {}
        self.patches = pytest.MonkeyPatch()

    def __enter__(self):
        for name in READ_METHODS:
            self.patches.setattr(torch.Tensor, name, self.reading(getattr(torch.Tensor, name), name))
        for name in UPLOADS:
            self.patches.setattr(torch, name, self.uploading(getattr(torch, name), name))
        return super().__enter__()

    def __exit__(self, *exc):
        self.patches.undo()
        super().__exit__(*exc)

    def reading(self, original, name):
        def read(tensor, *args, **kwargs):
            if tensor.data_ptr() not in self.on_host:
                self.seen.append(f"Tensor.{name}")
            return original(tensor, *args, **kwargs)

        return read

    def uploading(self, original, name):
        def upload(data, *args, **kwargs):
            made = original(data, *args, **kwargs)
            if kwargs.get("device") == "cpu":
                self.on_host[made.data_ptr()] = made
            elif not isinstance(data, torch.Tensor):
                self.seen.append(f"torch.{name}")
            return made

        return upload

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name(), kwargs or {}
        if name in READS or name.partition(".")[0] in READS or self._indexes_by_mask(name, args):
            self.seen.append(name)
        source = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        if name == "aten::_to_copy" and source is not None and kwargs.get("device", source) != source:
            self.seen.append(name)
        if name == "aten::copy_" and isinstance(args[1], torch.Tensor) and args[1].device != source:
            self.seen.append(name)
        return func(*args, **kwargs)

    @staticmethod
    def _indexes_by_mask(name, args):
        if not name.startswith(("aten::index.", "aten::index_put", "aten::_index_put")):
            return False
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


class Everything(nn.Module):
    """All kinds of layers: embedding, norms, convolutions of 1 to 3 dimensions, grouped, linear on sequences."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.rms = nn.RMSNorm(4)
        self.mix = nn.Linear(4, 4)
        self.ln = nn.LayerNorm(4)
        self.conv1 = nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular", groups=2)
        self.bn1 = nn.BatchNorm1d(4)
        self.conv2 = nn.Conv2d(4, 4, (1, 2), groups=4)
        self.gn = nn.GroupNorm(2, 4)
        self.conv3 = nn.Conv3d(4, 2, 1, bias=False)
        self.head = nn.Linear(10, 3)
        self.unused = nn.Linear(3, 3)
        """A layer that is never called must not make every factor step look for it."""

    def forward(self, index):
        x = self.ln(F.relu(self.mix(self.rms(self.embed(index))), inplace=True)).mT
        x = self.bn1(self.conv1(x)).unsqueeze(2)
        x = self.gn(torch.tanh(self.conv2(x))).unsqueeze(2)
        return self.head(self.conv3(x).flatten(1))


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (5, 6), generator=generator), torch.randint(0, 3, (5,), generator=generator)


def spied_steps(options, *, optimizer=None, mask=False, micro_batches=1, steps=12):
    """Train with a spy on every forward, backward and step; returns what it saw, by step."""
    torch.manual_seed(0)
    model = Everything()
    attached = optimizer(model.parameters(), lr=1e-3) if optimizer else None
    rhythm = {"warmup_refresh": None, "factor_interval": 2, "inverse_interval": 6}
    kfac = KFAC(model, attached, announce=False, **arranged(rhythm | options)) if options is not None else None
    seen = {}
    for step in range(steps):
        model.zero_grad()
        with Spy() as spy:
            for micro in range(micro_batches):
                x, y = make_batch(10 * step + micro)
                kept = x != 0
                if mask:
                    kfac.set_terms(kept.sum(), mask=kept)
                F.cross_entropy(model(x), y).div(micro_batches).backward()
            if attached is not None:
                attached.step()
            elif kfac is not None:
                kfac.step(lr=0.1)
        seen[step] = spy.seen
    return seen


REFRESHES = (0, 6)
VARIANTS = {
    "default": {},
    "unit norms": {"norm_form": "unit"},
    "full norms": {"norm_form": "full", "norm_damping": 0.1},
    "diagonal norms": {"norm_form": "diagonal"},
    "kl-clip": {"rescale": "kl-clip", "norm_form": "unit"},
    "norm-global": {"rescale": "norm-global"},
    "no rescale": {"rescale": "none", "damping": 0.0},
    "ekfac": {"curvature": "ekfac", "norm_form": "unit"},
    "ekfac kl-clip": {"curvature": "ekfac", "rescale": "kl-clip"},
    "cholesky": {"solver": "cholesky", "norm_form": "unit"},
    "warm-eigen": {"solver": "warm-eigen"},
    "reduce": {"weight_sharing": "reduce", "norm_form": "unit"},
    "reduce ekfac": {"weight_sharing": "reduce", "curvature": "ekfac"},
    "relative damping": {"damping_mode": "relative", "norm_form": "unit"},
    "no average": {"factor_decay": 0.0},
    "scheduled": {"damping": lambda step: 0.1 / (step + 1), "factor_decay": lambda step: 0.9},
    "tokens": {"loss_terms": "token"},
    "exact": {"fisher": "exact", "fisher_loss": "cross-entropy"},
}


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t.mean()),
        lambda t: bool(t.sum() > 0),
        lambda t: 1 if t.any() else 0,
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: torch.masked_select(t, t > 0),
        lambda t: t.masked_fill(t > 0, t.max()) if t.isnan().any() else t,
        lambda t: t.__setitem__(t > 0, 0.0),
        lambda t: torch.unique(t),
        lambda t: t.to("meta"),
        lambda t: torch.linalg.eigh(t @ t.mT),
        lambda t: torch.tensor(1.0),
        lambda t: torch.as_tensor(1.0, device=t.device),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
    ],
)
def test_the_spy_sees_every_way_of_reading_a_tensor(read):
    with Spy() as spy:
        read(torch.ones(2, 2))
    assert spy.seen


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, read):
        ctx.read = read
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.read(g)
        return g, None


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: t.tolist(), lambda t: torch.tensor(2.0), bool])
@pytest.mark.parametrize("where", ["backward", "step"])
def test_the_spy_sees_a_read_in_both_places_where_kfac_runs(where, read):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(*_):
        read(model.weight.detach().sum())

    if where == "step":
        optimizer.register_step_pre_hook(hook)
    with Spy() as spy:
        loss = model(torch.ones(1, 2)).sum()
        (ReadsInBackward.apply(loss, read) if where == "backward" else loss).backward()
        optimizer.step()
    assert spy.seen


def test_the_spy_lets_host_tensors_be_read_and_no_others():
    with Spy() as spy:
        torch.tensor([1, 2], device="cpu").tolist()
    assert spy.seen == []
    with Spy() as spy:
        (torch.tensor([1, 2], device="cpu") + 1).tolist()
    assert spy.seen == ["Tensor.tolist"]


def test_the_model_without_kfac_reads_nothing():
    assert set(map(tuple, spied_steps(None).values())) == {()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ordinary_and_factor_steps_read_nothing(variant):
    seen = spied_steps(VARIANTS[variant])
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}
    assert all(seen[step] for step in REFRESHES)


@pytest.mark.parametrize("variant", ["default", "ekfac", "reduce", "exact", "tokens"])
def test_masks_and_numbers_of_terms_on_the_device_are_not_read(variant):
    seen = spied_steps(VARIANTS[variant], mask=True)
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}


@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
def test_accumulation_reads_nothing(accumulate):
    seen = spied_steps({"accumulate": accumulate, "curvature": "ekfac"}, micro_batches=3)
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}


@pytest.mark.parametrize("variant", ["default", "kl-clip"])
def test_with_an_optimizer_attached_nothing_is_read(variant):
    seen = spied_steps(VARIANTS[variant], optimizer=torch.optim.SGD)
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adams_steps_in_the_eigenbasis_read_nothing(weight_decay):
    """All layers are K-FAC's, so torch's own AdamW, which reads its counts on the CPU, has nothing to do."""
    optimizer = functools.partial(torch.optim.AdamW, weight_decay=weight_decay)
    seen = spied_steps({"curvature": "adam-eigen", "norm_form": "unit"}, optimizer=optimizer)
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}


@pytest.mark.parametrize("damping_mode", ["absolute", "relative"])
@pytest.mark.parametrize("dim", [4, 5])
def test_a_layer_on_a_lower_rung_reads_nothing_either(dim, damping_mode, monkeypatch):
    """One factor with an eigenbasis and one with a damped inverse: both are applied without a read."""
    eigh = torch.linalg.eigh

    def failing(matrix):
        if matrix.shape[-1] == dim:
            raise torch.linalg.LinAlgError("failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    seen = spied_steps({"damping_mode": damping_mode})
    assert {step: names for step, names in seen.items() if names and step not in REFRESHES} == {}


def test_a_bad_batch_is_skipped_without_a_read():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    kfac = KFAC(model, announce=False, warmup_refresh=None, factor_interval=1, inverse_interval=100)
    for step in range(4):
        model.zero_grad()
        with Spy() as spy:
            x = torch.full((4, 3), float("nan") if step == 2 else 1.0)
            model(x).square().mean().backward()
            kfac.step()
        assert not spy.seen or step == 0
    assert kfac.metrics()["skipped_batches"] == 1
