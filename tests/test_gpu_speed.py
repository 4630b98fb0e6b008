"""The fast path on a GPU: graphs, sampled statistics, refreshes in place. The same numbers, and no waiting."""

import pytest
import torch
import torch.nn.functional as F
from helpers_optimizers import optimizer_of
from test_gpu import batches
from torch import nn

import dkfac

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build() -> nn.Module:
    """Layers of one shape, with and without bias, that are aligned and that are not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 1, bias=False), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 5),
    ).cuda()  # fmt: skip


def train(steps=30, *, spoil=(), part=(), precision=torch.float32, look=False, nudge=0.0, **options):
    """Return the weights after training through a bad and a short batch; ``nudge``: of the first weights, relative."""
    torch.backends.cudnn.deterministic = True
    model = build().to(memory_format=torch.channels_last)
    if precision == torch.float64:
        model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    optimizer = optimizer_of(model, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    given = {"solver": "cholesky", "factor_interval": 1, "inverse_interval": 5, "warmup_refresh": None}
    options = given | {"tf32": False, "cuda_graph": False, "spread_refresh": 1} | options
    kfac = dkfac.KFAC(model, optimizer, announce=False, **options)
    for step, (x, y) in enumerate(batches(steps, "cuda")):
        x, y = (x[:9], y[:9]) if step in part else (x, y)
        x = x * float("nan") if step in spoil else x
        x = x.double() if precision == torch.float64 else x
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if look and step >= 12 else "default")
        try:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        schedule.step()
    return [p.detach().clone() for p in model.parameters()], kfac


CASES = [
    {},
    {"solver": "warm-eigen"},
    {"damping_mode": "relative"},
    {"solver": "warm-eigen", "damping_mode": "relative", "rescale": "norm"},
    {"spread_refresh": 3, "tf32": True},
    {"statistics_fraction": 0.25},
    {"factor_interval": 5, "inverse_interval": 10, "spread_refresh": 10},
    {"curvature": "adam-eigen", "solver": "warm-eigen"},
    {"curvature": "adam-eigen", "solver": "warm-eigen", "spread_refresh": 3},
    {"curvature": "adam-eigen", "inverse_interval": 100, "solver": "warm-eigen", "l2": True},
]


QUIET = [options for options in CASES if options.get("solver") != "warm-eigen"]
"""Warm bases of factors of low rank fail the check and are repaired, for which the host has to look."""


def distance(found, expected):
    """Between two lists of weights, relative."""
    pairs = list(zip(found, expected, strict=True))
    return float(sum((a - b).square().sum() for a, b in pairs).sqrt() / sum(b.square().sum() for b in expected).sqrt())


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_graph_takes_the_same_steps(options, precision):
    """As closely as a run whose first weights are rounded once more: warm bases make much of little."""
    rough = {"spoil": (12,), "part": (17, 18), "precision": precision, **options}
    expected, plain = train(**rough)
    found, graphed = train(**rough, cuda_graph=True)
    assert all(torch.isfinite(p).all() for p in found)
    nudge, least = (2**-50, 1e-9) if precision == torch.float64 else (2**-22, 1e-5)
    nudged, _ = train(**rough, nudge=nudge)
    assert distance(found, expected) < 3 * distance(nudged, expected) + least
    ours, theirs = graphed.metrics(), plain.metrics()
    assert ours["skipped_batches"] == theirs["skipped_batches"] == 1
    assert ours["refreshes"] == theirs["refreshes"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("options", [*QUIET, {"cuda_graph": True}, {"cuda_graph": True, "spread_refresh": 5}], ids=str)
def test_no_step_waits_for_the_device_not_even_a_refresh(options):
    _, kfac = train(look=True, **options)
    assert kfac._engine.metrics.counters["ok"] > 0


def test_factors_in_bfloat16_equal_those_of_the_same_rows_in_float64():
    """Products of halves are exact in float32: only the sums round."""
    model = build().to(memory_format=torch.channels_last)
    with dkfac.KFAC(model, announce=False, damping=1e-3, solver="eigen", tf32=False) as kfac:
        (x, y), *_ = batches(1, "cuda")
        seen = {}

        def keep(name):
            return lambda module, inputs, output: seen.__setitem__(name, inputs[0].detach().double())

        handles = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if n in ("3", "7", "9")]
        with torch.autocast("cuda", torch.bfloat16):
            F.cross_entropy(model(x), y).backward()
        kfac.step()
        for handle in handles:
            handle.remove()
        for name, x in seen.items():
            module = model[int(name)]
            rows = F.unfold(x.to(torch.bfloat16).double(), module.kernel_size, 1, module.padding, module.stride)
            rows = rows.mT.reshape(-1, rows.shape[1])
            if module.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            expected = rows.mT @ rows / len(rows)
            assert (kfac.factors()[name]["A"].double() - expected).norm() < 1e-5 * expected.norm()


def test_running_factors_stay_positive_wherever_tensors_come_to_lie():
    """Memory that moves between steps brings graphs about in another order than that of the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(32, 32, 1, bias=False) for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"solver": "cholesky", "factor_interval": 1, "inverse_interval": 10, "warmup_refresh": None}
    options |= {"tf32": False, "spread_refresh": 1}
    kfac = dkfac.KFAC(model, optimizer, announce=False, cuda_graph=True, **options)
    kept = []
    for step in range(30):
        if step % 3 == 0:
            kept = [torch.empty(2**20 * (1 + (7 * step + i) % 5), device="cuda") for i in range(step % 4)]
        optimizer.zero_grad()
        model(torch.randn(64, 32, 64, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    assert len(kept) <= 3
    for factors in kfac.factors().values():
        for factor in factors.values():
            values = torch.linalg.eigvalsh(factor.double())
            assert values[0] > -1e-5 * values[-1]
    assert kfac._engine.metrics.counters["ok"] > 0
