"""What K-FAC says of itself: the table, the line at attach, metrics, report, and warnings when it does not pay."""

import re
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.plan.make import Choices, make_plan
from dkfac.runtime import notices, report

EXACT = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 2}


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """Something of each kind, and something of each reason to be left out."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(40, 32)
        self.norm = nn.LayerNorm(32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=4)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.half_frozen = nn.Linear(32, 32)
        self.half_frozen.bias.requires_grad_(False)
        self.mine = Doubled(32, 32)
        self.wide = nn.Linear(32, 70)
        self.skipped = nn.Linear(70, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, index):
        x = self.conv(self.norm(self.embed(index)).mT).mT.mean(1) * self.scale
        return self.head(self.skipped(self.wide(self.mine(self.half_frozen(self.frozen(x))))))


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 40, (8, 5), generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def make_mixed(**options):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"announce": False, "norm_form": "unit", "max_dim": 64, "skip": ["skip*"], **EXACT} | options
    return model, optimizer, KFAC(model, optimizer, **arranged(options))


def test_the_table_shows_what_is_preconditioned_and_what_is_left_and_why():
    _, _, kfac = make_mixed()
    text = str(kfac)
    assert text == repr(kfac)
    ours, left = text.split("left to the optimizer")
    rows = {line.split()[0]: line for line in ours.splitlines()[2:]}
    wanted = {
        "embed": ["embedding", "A=40d", "G=32", "1,280"],
        "norm": ["norm-unit", "F=32x2", "64"],
        "conv": ["conv", "A=4x25", "G=4x8", "800"],
        "half_frozen": ["linear", "A=32", "G=32", "1,024"],
        "head": ["linear", "A=33", "G=10", "330"],
        "mine": ["linear"],
    }
    assert rows.keys() == wanted.keys()
    for name, words in wanted.items():
        assert rows[name].split()[1 : 1 + len(words)] == words
    left_rows = {line.split()[0]: line for line in left.splitlines()[1:]}
    reasons = {
        "Mixed": "no K-FAC rule for Mixed",
        "frozen": "frozen",
        "half_frozen.bias": "frozen",
        "wide": "G of dim 70 > max_dim=64",
        "skipped": "skip='skip*'",
    }
    assert left_rows.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert left_rows[name].endswith(reason)


def test_the_numbers_of_parameters_in_the_table_add_up_to_the_models():
    model, _, kfac = make_mixed()
    total = sum(p.numel() for p in model.parameters())
    ours = sum(layer.spec.grad_elements for layer in kfac.layers)
    assert f"{len(kfac.layers)} layers, {ours:,} parameters preconditioned" in str(kfac)
    assert f"left to the optimizer: {total - ours:,} parameters" in str(kfac)


def test_a_layer_that_never_ran_is_marked():
    model = nn.ModuleDict({"used": nn.Linear(40, 10), "unused": nn.Linear(3, 3)})
    model.forward = lambda index: model["used"](F.one_hot(index, 40).float().mean(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = KFAC(model, optimizer, announce=False)
    assert str(kfac).count("not measured yet") == 2
    train(model, optimizer, 1)
    marked = [line for line in str(kfac).splitlines() if "not measured yet" in line]
    assert [line.split()[0] for line in marked] == ["unused"]


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.AdamW])
def test_one_line_on_stderr_says_what_was_attached(optimizer, capsys):
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    KFAC(model, optimizer and optimizer(model.parameters(), lr=0.1), damping=0.02, solver="warm-eigen", rescale="none")
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    name = optimizer.__name__ if optimizer else "your own steps"
    how, advice = ("kfac, warm-eigen, damping 0.02 absolute", "rescale none"), "keep your lr and schedule"
    rhythm = "every 10, inverses every 100 steps, more often before step 400"
    if optimizer is torch.optim.AdamW:  # whose step has no damping
        how, advice = ("(adam-eigen, warm-eigen, factors",), "try a larger lr and fewer steps: dkfac.suggest"
        rhythm = "every 20, inverses every 20 steps, more often before step 500"
    for words in ("2 layers", "85.2%", name, *how, "memory"):
        assert words in line, words
    assert line.endswith(advice)
    assert rhythm in line


def test_announce_false_says_nothing(capsys):
    make_mixed()
    assert capsys.readouterr() == ("", "")


def announced_bytes(line):
    number, unit = re.search(r"about ([\d.]+) (B|kB|MB|GB) extra memory", line).groups()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


VARIANTS = [
    {},
    {"solver": "cholesky"},
    {"solver": "warm-eigen"},
    {"curvature": "ekfac"},
    {"norm_form": "full"},
    {"norm_form": "diagonal", "weight_sharing": "reduce"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_announced_memory_is_what_is_held_after_some_steps(options, capsys):
    model, optimizer, kfac = make_mixed(announce=True, **options)
    announced = announced_bytes(capsys.readouterr().err)
    train(model, optimizer, 3)
    held = kfac.report()["total_memory_bytes"]
    assert announced == pytest.approx(held, rel=0.05)
    assert sum(report.state_bytes(layer, kfac.settings) for layer in kfac.layers) == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("width", [8, 10, 13, 20, 60, 300, 330])
def test_the_announced_memory_is_rounded_by_less_than_5_percent(width, capsys):
    kfac = KFAC(nn.Linear(width, width, bias=False))
    wanted = sum(report.state_bytes(layer, kfac.settings) for layer in kfac.layers)
    assert announced_bytes(capsys.readouterr().err) == pytest.approx(wanted, rel=0.05)


def test_reported_memory_is_the_bytes_of_the_state():
    model, optimizer, kfac = make_mixed(curvature="ekfac")
    train(model, optimizer, 3)

    def num_bytes(value):
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(num_bytes(v) for v in value.values()) if isinstance(value, dict) else 0

    found = kfac.report()
    assert found["memory_bytes"] == {n: num_bytes(state) for n, state in kfac.state_dict()["layers"].items()}
    assert found["total_memory_bytes"] == sum(found["memory_bytes"].values())


def test_report_has_counters_and_seconds_of_each_stage():
    model, optimizer, kfac = make_mixed()
    begin = time.perf_counter()
    train(model, optimizer, 5)
    elapsed = time.perf_counter() - begin
    found = kfac.report()
    assert (found["steps"], found["layers"]) == (5, 6)
    assert found["counters"]["refreshes"] == 3
    assert all(type(value) is int for value in found["counters"].values())
    assert found["stage_seconds"].keys() == {"capture", "average", "decompose", "precondition"}
    assert all(seconds > 0 for seconds in found["stage_seconds"].values())
    assert sum(found["stage_seconds"].values()) < elapsed


# --- metrics -------------------------------------------------------------------------------------------------

ALWAYS = {"step", "damping", "refreshes", "late_refreshes", "repaired_factors", "skipped_batches", "abandoned_steps"}
ALWAYS |= {f"fallbacks_{rung}" for rung in ("float64", "cholesky", "kept", "raw")}


def test_metrics_are_a_flat_dict_of_floats_from_the_start():
    model, optimizer, kfac = make_mixed(rescale="kl-clip")
    assert kfac.metrics().keys() >= ALWAYS
    train(model, optimizer, 3)
    found = kfac.metrics()
    assert found.keys() == ALWAYS | {"grad_norm", "update_norm", "clip_factor", "clipped_steps"}
    assert all(type(value) is float for value in found.values())
    assert found["step"] == 3.0
    assert found["refreshes"] == 2.0


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "none", "kl-clip"])
def test_norms_before_and_after_are_those_of_the_gradients(rescale):
    model, optimizer, kfac = make_mixed(rescale=rescale)
    parameters = [p for layer in kfac.layers for p in layer.parameters()]
    seen = {}
    train(model, optimizer, 3)
    optimizer.register_step_post_hook(lambda *_: seen.update(after=[p.grad.clone() for p in parameters]))
    x, y = torch.randint(0, 40, (8, 5)), torch.randint(0, 10, (8,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = torch.cat([p.grad.reshape(-1) for p in parameters])
    optimizer.step()
    after = torch.cat([g.reshape(-1) for g in seen["after"]])
    found = kfac.metrics()
    assert found["grad_norm"] == pytest.approx(float(before.norm()), rel=1e-5)
    assert found["update_norm"] == pytest.approx(float(after.norm()), rel=1e-5)
    if rescale in ("norm", "norm-global"):
        assert found["update_norm"] == pytest.approx(found["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("kl_clip", "clipped"), [(1e-12, 4.0), (1e12, 0.0)])
def test_the_clip_factor_and_the_clipped_steps_are_counted(kl_clip, clipped):
    model, optimizer, kfac = make_mixed(rescale="kl-clip", kl_clip=kl_clip)
    train(model, optimizer, 4)
    found = kfac.metrics()
    assert found["clipped_steps"] == clipped
    assert (found["clip_factor"] == 1.0) == (clipped == 0)
    assert kfac.report()["counters"]["clipped_steps"] == int(clipped)


def test_the_damping_in_the_metrics_is_the_last_steps():
    model, optimizer, kfac = make_mixed(damping=lambda step: 0.5 ** (step + 1))
    train(model, optimizer, 3)
    assert kfac.metrics()["damping"] == 0.125


# --- K-FAC may not pay off ---------------------------------------------------------------------------------


def watch(monkeypatch, looks):
    """Feed a Watch with ``(step, seconds passed, K-FAC's seconds, dominated, clipped)``; returns the warnings."""
    watched = notices.Diagnostics()
    now = 100.0
    ours = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, passed, spent, dominated, clipped in looks:
            now, ours = now + passed, ours + spent
            monkeypatch.setattr(time, "perf_counter", lambda now=now: now)
            watched.look(step, kfac_seconds=ours, dominated_share=dominated, clipped_share=lambda c=clipped: c)
    return [str(warning.message) for warning in caught]


CASES = {
    "nothing": ((1.0, 0.1, 0.0, 0.0), None),
    "time": ((1.0, 0.9, 0.0, 0.0), "it takes 90% of the time of a step (10.0 times"),
    "half the time": ((1.0, 0.5, 0.0, 0.0), None),
    "damping": ((1.0, 0.1, 0.8, 0.0), "damping exceeds the largest curvature in 80% of the layers"),
    "damping in few": ((1.0, 0.1, 0.5, 0.0), None),
    "clip": ((1.0, 0.1, 0.0, 1.0), "the KL clip shortened 100% of the steps"),
    "clip sometimes": ((1.0, 0.1, 0.0, 0.9), None),
}


@pytest.mark.parametrize("case", CASES)
def test_each_complaint_comes_once_after_200_steps_and_only_with_its_reason(case, monkeypatch):
    figures, words = CASES[case]
    early = [(step, *figures) for step in range(0, 200, 50)]
    assert watch(monkeypatch, early) == []
    said = watch(monkeypatch, early + [(step, *figures) for step in range(200, 600, 50)])
    assert len(said) == (words is not None)
    assert all(message.startswith("K-FAC may not pay off: ") and words in message for message in said)


def test_all_three_complaints_can_come_each_once(monkeypatch):
    assert len(watch(monkeypatch, [(step, 1.0, 0.9, 1.0, 1.0) for step in range(0, 1000, 50)])) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [({"damping": 1e6}, "damping exceeds"), ({"rescale": "kl-clip", "kl_clip": 1e-15}, "the KL clip shortened")],
)
def test_a_training_run_that_does_not_pay_warns_once(options, words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(20, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    KFAC(
        model,
        optimizer,
        announce=False,
        warmup_refresh=None,
        factor_interval=10,
        inverse_interval=50,
        **arranged(options),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 320)
    said = [str(warning.message) for warning in caught if "of the time of a step" not in str(warning.message)]
    assert len(said) == 1
    assert words in said[0]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "adam-eigen"])
def test_one_rank_of_a_plan_keeps_what_one_process_does(curvature):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    is_adam = curvature == "adam-eigen"
    optimizer = (torch.optim.AdamW if is_adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    with KFAC(model, optimizer, curvature=curvature, announce=False) as kfac:
        specs = [layer.spec for layer in kfac.layers]
        plans = [make_plan(specs, size, Choices(strategy="sharded", moments=curvature == "ekfac")) for size in (1, 2)]
        alone = sum(report.state_bytes(layer, kfac.settings) for layer in kfac.layers)
        assert report.bytes_by_rank(kfac.layers, kfac.settings, plans[0]) == [alone]
        both = sum(report.bytes_by_rank(kfac.layers, kfac.settings, plans[1]))
        assert both > alone if curvature == "ekfac" else both == alone  # EKFAC measures in the bases, on every rank
