"""What only a GPU can show: no host synchronisation, and the same numbers as on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

import dkfac

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4, padding="same"), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.LayerNorm(16), nn.ReLU(inplace=True),
        nn.Linear(16, 5),
    )  # fmt: skip


def batches(number: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 3, 8, 8, generator=generator).to(device),
            torch.randint(0, 5, (32,), generator=generator).to(device),
        )
        for _ in range(number)
    ]


EXACT = {"solver": "eigen", "tf32": False, "cuda_graph": False, "spread_refresh": 1, "statistics_fraction": 1.0}
CASES = [
    {},
    {"curvature": "ekfac"},
    {"rescale": "kl-clip"},
    {"rescale": "norm-global", "damping_mode": "relative"},
    {"solver": "cholesky"},
    {"solver": "warm-eigen"},
    {"weight_sharing": "reduce"},
    {"norm_form": "full"},
    {"norm_form": "diagonal"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_ordinary_and_factor_steps_never_wait_for_the_device(options):
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"norm_form": "unit", **EXACT, **options}
    kfac = dkfac.KFAC(
        model,
        optimizer,
        announce=False,
        factor_interval=2,
        inverse_interval=8,
        warmup_refresh=None,
        **arranged(options),
    )
    data = batches(9, "cuda")
    for step, (x, y) in enumerate(data):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if step % 8 == 0 else "error")
        try:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kfac.metrics()["refreshes"] == 2


def test_the_spy_sees_a_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_cuda_steps_equal_cpu_steps_in_float64(options, channels_last):
    results = []
    options = {"norm_form": "unit", **EXACT, **options}
    for device in ("cpu", "cuda"):
        model = build().double().to(device)
        if channels_last and device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        kfac = dkfac.KFAC(
            model, optimizer, announce=False, factor_interval=1, inverse_interval=2, warmup_refresh=None,
            **arranged({"damping": 1e-2, **options}),
        )  # fmt: skip
        for x, y in batches(5, device):
            x = x.double().contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]))
        kfac.close()
    if options.get("curvature") == "ekfac" or options.get("solver") == "warm-eigen":
        # Rank-deficient factors have an arbitrary basis of their null space, which these two depend on.
        torch.testing.assert_close(results[0], results[1], rtol=0.2, atol=0.05)
    else:
        torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradient_scaler_changes_nothing_through_overflows(fused, optimizer_type):
    results, steps = [], []
    for scaled in (False, True):
        model = build().cuda()
        # A large eps keeps AdamW smooth: with the usual one it turns float16 noise into full steps.
        smooth = {"eps": 1e-2} if optimizer_type is torch.optim.AdamW else {}
        optimizer = optimizer_type(model.parameters(), lr=1e-2, fused=fused, **smooth)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, enabled=scaled)
        kfac = dkfac.KFAC(
            model, optimizer, announce=False, grad_scaler=scaler, factor_interval=1, inverse_interval=1,
            warmup_refresh=None, damping=1e-2, **EXACT,
        )  # fmt: skip
        taken = 0
        for x, y in batches(6, "cuda"):
            for _attempt in range(20):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    taken += 1
                    break
        assert taken == 6
        metrics = kfac.metrics()
        steps.append(metrics["step"] - (metrics["skipped_batches"] if fused else 0))
        if scaled:
            assert metrics["abandoned_steps"] + metrics["skipped_batches"] > 0
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert all(t.dtype == torch.float32 for f in kfac.factors().values() for t in f.values())
    assert steps[0] == steps[1] == 6
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore")  # torch 2.11 warns about its own compiler, and advises TF32
def test_a_compiled_model_measures_the_same_factors():
    factors = []
    for compiled in (False, True):
        model = build().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kfac = dkfac.KFAC(model, optimizer, announce=False, norm_form="unit", **EXACT)
        forward = torch.compile(model, fullgraph=True) if compiled else model
        for x, y in batches(3, "cuda"):
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()
        factors.append(kfac.factors())
    for name, layer in factors[0].items():
        for key, expected in layer.items():
            torch.testing.assert_close(factors[1][name][key], expected, rtol=1e-3, atol=1e-5)


def test_state_moves_between_cpu_and_cuda():
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = dkfac.KFAC(model, optimizer, announce=False)
    for x, y in batches(2, "cuda"):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    other = build()
    fresh = dkfac.KFAC(other, announce=False)
    fresh.load_state_dict(kfac.state_dict())
    for name, layer in kfac.factors().items():
        for key, factor in layer.items():
            assert torch.equal(fresh.factors()[name][key], factor.cpu())


CHOSEN = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"norm_form": "full", "damping_mode": "relative", "damping": 0.01}),
    (torch.optim.SGD, {"rescale": "kl-clip", "weight_sharing": "reduce"}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"rescale": "kl-clip", "kl_clip": 1e-3, "block_dim": 10}),
    (torch.optim.AdamW, {"curvature": "kfac"}),
]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CHOSEN, ids=str)
def test_what_is_chosen_on_a_gpu_trains(kind, options, precision):
    model = build().to("cuda", torch.float64 if precision == torch.float64 else torch.float32)
    optimizer = kind(model.parameters(), lr=0.05 if kind is torch.optim.SGD else 5e-3)
    with dkfac.KFAC(model, optimizer, announce=False, **arranged(options)) as kfac:
        can_capture = kind is not torch.optim.SGD or options.get("rescale") != "kl-clip"
        assert kfac.settings.tf32
        assert kfac.settings.solver == ("cholesky" if kfac.settings.curvature == "kfac" else "warm-eigen")
        assert kfac.settings.cuda_graph == can_capture
        losses = []
        for x, y in [(x.to(model[0].weight.dtype), y) for x, y in batches(2, "cuda")] * 60:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert losses[-1] < 0.5 * losses[0], [float(loss) for loss in losses[::10]]
        assert (kfac._engine.graph._writing._graph is not None) == can_capture
        counters = kfac.report()["counters"]
        assert not any(number for name, number in counters.items() if name.startswith("fallbacks")), counters
