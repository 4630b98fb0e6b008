"""The steps of ``curvature="adaptive"`` in few launches take those of plain torch. In Triton's interpreter.

Kernels run only where there are graphs, so graphs are acted as in ``test_step_graphs.py``; without graphs, the same
runs are torch's.
"""

import pytest
import test_step_graphs as graphs
import torch
import torch.nn.functional as F
from helpers_exact import Conv1D
from helpers_kernels import assert_passes_interpreted
from torch import nn

import dkfac
from dkfac.factors import stacks
from dkfac.ops import tile_products, together
from dkfac.precondition import adaptive_steps
from dkfac.runtime import engine

played, acted = graphs.played, graphs.acted
interpreted = pytest.mark.skipif(not graphs.INTERPRETED, reason="for the session in Triton's interpreter")


class Net(nn.Module):
    """Layers with and without bias, in one block and in several, transposed, with a diagonal factor; norm layers."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1),
            nn.ReLU(), nn.Conv2d(6, 12, 3, padding=1, groups=3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.embedding, self.attention = nn.Embedding(3, 12), nn.MultiheadAttention(12, 2, batch_first=True)
        self.linears = nn.Sequential(
            nn.Linear(48, 36), nn.ReLU(), nn.Linear(36, 36), nn.ReLU(), Conv1D(20, 36), nn.ReLU(), nn.Linear(20, 3)
        )

    def forward(self, x):
        tokens = self.convs(x).view(-1, 4, 12) + self.embedding((x[:, 0, 0, :4] > 0).long())
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.linears(tokens.flatten(1))


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, Nesterov, maximize": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "Adam, L2": lambda ps: torch.optim.Adam(ps, lr=1e-2, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1),
}


def train(name, steps=6, dtype=torch.float32, block_dim=16, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    options = {"factor_interval": 1, "inverse_interval": 3, "solver": "warm-eigen", "warmup_refresh": None} | options
    options |= {"norm_form": "unit", "tf32": True}
    kfac = dkfac.KFAC(model, optimizer, announce=False, block_dim=block_dim, **options)
    generator, told = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(12, 2, 6, 6, generator=generator).to(dtype)
        y = torch.randint(0, 3, (12,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * float("nan") if step == 4 else x), y)
        (-loss if "maximize" in name else loss).backward()
        optimizer.step()
        schedule.step()
        told.append([kfac.metrics()[key] for key in ("grad_norm", "update_norm")])
    return [p.detach().clone() for p in model.parameters()], kfac, torch.tensor(told)


def padded(monkeypatch):
    """Lay out tensors as for a GPU."""
    for module in (stacks, together):
        monkeypatch.setattr(module, "aligned", lambda size, _: size if size <= 8 else size + -size % 8)


@pytest.mark.parametrize("block_dim", [16, None])
def test_padding_changes_nothing(monkeypatch, block_dim):
    options = {"dtype": torch.float64, "block_dim": block_dim, "steps": 3}
    monkeypatch.setattr(stacks, "MOST_ELEMENTS", {})
    theirs = train("Adam, L2", **options)
    padded(monkeypatch)
    real, made = engine.make_stacks, []
    monkeypatch.setattr(engine, "make_stacks", lambda layers: made.extend(real(layers)) or made)
    ours = train("Adam, L2", **options)
    assert {stack.blocks for stack in made if stack.padded != stack.sizes} == {1, 3}
    for one, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    ("name", "block_dim", "pads"),
    [
        ("SGD", 16, False),
        ("SGD, Nesterov, maximize", None, True),
        ("AdamW", 16, True),
        ("Adam, L2", 40, False),
    ],
)
def test_interpreted_steps_of_all_layers_are_those_of_torch(acted, name, block_dim, pads, monkeypatch):
    options = {"block_dim": block_dim}
    exact, theirs = train(name, dtype=torch.float64, **options), train(name, **options)
    monkeypatch.setattr(stacks, "MOST_ELEMENTS", {})
    if pads:
        padded(monkeypatch)
    if block_dim == 40:
        monkeypatch.setattr(adaptive_steps, "MOST_WORK", 2000)
        monkeypatch.setattr(tile_products, "MOST_WIDTH", 32)  # wider ones are left to torch
    real, by_torch = adaptive_steps.rotate, []
    monkeypatch.setattr(adaptive_steps, "rotate", lambda *a, **b: by_torch.append(a[0].shape) or real(*a, **b))
    ours = train(name, **options, cuda_graph=True)
    assert (len(set(by_torch)) > 1) == (block_dim == 40), "at most a map of inputs is left to torch"
    assert graphs.Acted.replays > 6
    for one, other, truth in zip(ours[0], theirs[0], exact[0], strict=True):  # small second moments enlarge rounding
        assert (one - truth).norm() <= 10 * (other - truth).norm() + 1e-4 * truth.norm()
    torch.testing.assert_close(ours[2], theirs[2], rtol=5e-3, atol=1e-3, equal_nan=True)


@graphs.needs_triton
@pytest.mark.slow  # each kernel by itself is interpreted in other tests
@pytest.mark.skipif(graphs.INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted_")
