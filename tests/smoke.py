"""A smoke test without pytest, for the oldest and the newest torch: ``python tests/smoke.py``.

Trains small models in ways that use torch's private names; fails on an error, a warning, or a loss that does not fall.
"""

import copy
import io
import sys
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dkfac


class Net(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.recompute = recompute

    def forward(self, x):
        block = nn.Sequential(self.conv, self.norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return self.head(checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))


def train(make_optimizer, *, recompute=False, compiled=False, scaled=False, steps=12, **options):
    torch.manual_seed(0)
    x = torch.randn(48, 1, 8, 8)
    y = x.flatten(1)[:, :3].argmax(1)
    model = Net(recompute)
    optimizer = make_optimizer(model.parameters())
    kfac = dkfac.KFAC(model, optimizer, announce=False, norm_form="unit", **options)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert kfac.metrics()["step"] == steps
    assert len(kfac.factors()) == 3
    return model, optimizer, kfac


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


CASES = {
    "SGD": lambda: train(sgd),
    "AdamW": lambda: train(adamw),
    "eigen, cholesky, exact Fisher": lambda: [
        train(sgd, curvature="ekfac"), train(sgd, curvature="kfac", solver="cholesky"),
        train(sgd, fisher="exact", fisher_loss="cross-entropy"),
    ],
    "checkpointing": lambda: train(sgd, recompute=True),
    "scaler": lambda: train(sgd, scaled=True),
    "compile": lambda: train(sgd, compiled=True),
}  # fmt: skip


def check_copies():
    model, _, kfac = train(adamw)
    file = io.BytesIO()
    torch.save(copy.deepcopy(model), file)
    torch.save(model, file)
    assert b"dkfac" not in file.getvalue()
    state = kfac.state_dict()
    kfac.load_state_dict(state)
    kfac.close()


def check_attention():
    """Projections that a function of torch's applies, and a resume from the optimizer's state dict alone."""
    torch.manual_seed(0)
    x, found, saved = torch.randn(12, 5, 8), [], None
    for parts in ((8,), (5, 3)):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        for part in parts:
            optimizer = adamw(model.parameters())
            kfac = dkfac.KFAC(model, optimizer, announce=False)
            if saved is not None:
                optimizer.load_state_dict(saved)
            for _ in range(part):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            assert "self_attn.in_proj.q" in kfac.factors()
            saved = copy.deepcopy(optimizer.state_dict()) if part != parts[-1] else None
            kfac.close()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def main():
    warnings.simplefilter("error")
    for module in ("torch", "networkx", "sympy"):  # what they warn of is theirs
        warnings.filterwarnings("ignore", module=module)
    failed = []
    for name, case in {**CASES, "copies": check_copies, "attention, resume": check_attention}.items():
        try:
            case()
            print(f"ok      {name}")
        except Exception as error:
            failed.append(name)
            print(f"FAILED  {name}: {type(error).__name__}: {error}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}: {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
