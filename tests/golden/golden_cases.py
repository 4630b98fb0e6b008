"""Short training runs that together use every setting of K-FAC, and how to run one of them.

They are the safety net of refactorings: a run's result holds every parameter, the optimizer's state and K-FAC's state,
so that two trees can be compared bit by bit (``golden_run.py``). Everything here is public API, but for
``acted_graphs``, which has all hooks into internals.
"""

import contextlib
import copy
import hashlib
import importlib
import json
import pkgutil
import sys
import threading
import warnings
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

import dkfac

STEPS, BATCH, RANKS = 20, 96, 4
SNAPSHOTS = (1, 3, 5, 10, 15, 20)
"""Steps after which parameters and factors are kept, to see where two runs part."""
TIMEOUT_SECONDS = 100
LOCK = threading.Lock()
"""Ranks that are threads share torch's random numbers."""
TIMES = ("late", "late_refreshes")
"""Counters that depend on how fast a thread was."""


# --- networks -----------------------------------------------------------------------------------------------


def deep():
    sizes = [5, 4, 6, 5, 4, 3]
    layers = [nn.Linear(sizes[i], sizes[i + 1], bias=i != 1) for i in range(5)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))[:-1]


def wide():
    """The first layer is wide enough for ``spd`` to give its input factor to one rank, and for rows to travel."""
    return nn.Sequential(nn.Linear(60, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))


def vision():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3, bias=False),
    )


def alike():
    """Layers of one shape, a batch norm, and parameters of no layer's."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(),
        nn.Conv2d(4, 4, 1, bias=False), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def language():
    return nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.RMSNorm(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


NETS = {
    "deep": (deep, (5,)),
    "wide": (wide, (60,)),
    "vision": (vision, (1, 6, 6)),
    "alike": (alike, (1, 6, 6)),
    "language": (language, (4,)),
}


@torch.no_grad()
def build(net):
    """Return a network in float64, its parameters made of integers: torch's own float32 ones differ between CPUs."""
    model, generator = NETS[net][0]().double(), torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            scale = 1.0 if isinstance(module, nn.Embedding) else module.weight[0].numel() ** -0.5
            for p in module.parameters(recurse=False):
                p.copy_(torch.randint(-512, 513, p.shape, generator=generator).double() / 512 * scale)
            if isinstance(module, nn.Embedding):
                module.weight[module.padding_idx] = 0
    return model


# --- cases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run: ``ways`` are "one" process, "four" ranks, and acted "graphs"."""

    options: dict
    ways: tuple
    net: str = "deep"
    optimizer: str = "sgd"
    loop: str = "plain"
    loss: str = "cross-entropy"
    micro: int = 1
    dtype: torch.dtype = torch.float64
    resume: dict | None = None
    """What ``state_dict`` is given when half-way all goes on in a new model, optimizer and KFAC."""
    odd: bool = False
    """Some batches are smaller, one has no finite loss, and the learning rate falls."""
    extra: dict = field(default_factory=dict)


CASES: dict[str, Case] = {}
RHYTHM = {"warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4}
KFAC = RHYTHM | {"curvature": "kfac", "damping": 1e-2}
WARM = RHYTHM | {"solver": "warm-eigen"}


MOVED = {f.name for f in fields(getattr(dkfac.Settings(), "experimental", Case({}, ())))} - {"norm_form", "flattened"}
"""Settings that older trees have beside the others, newer ones in ``experimental``."""
LATER = {"replicas_may_differ", "patience"}
"""Settings that older trees lack, and that change no value."""


def arranged(options):
    """Return options as the tree takes them; a case has all of them side by side."""
    options = {
        n: v for n, v in options.items() if n not in LATER or n in MOVED | set(dkfac.Settings.__dataclass_fields__)
    }
    if "experimental" not in dkfac.Settings.__dataclass_fields__:
        return options
    apart = {"norm_form": ("full", "diagonal")}
    moved = {n for n, v in options.items() if n in MOVED or v in apart.get(n, ()) or isinstance(v, dict)}
    return {n: v for n, v in options.items() if n not in moved} | {"experimental": {n: options[n] for n in moved}}


def case(name, options, ways="14", **details):
    known = {"1": "one", "4": "four", "g": "graphs"}
    assert name not in CASES
    CASES[name] = Case({"announce": False} | options, tuple(known[way] for way in ways), **details)


# Curvatures, optimizers and solvers
case("default-sgd", {}, "14")
case("default-adamw", {}, "14", optimizer="adamw", net="language", extra={"lr": 3e-3})
case("adaptive-sgd", WARM, "14g", net="alike", odd=True)
case("adaptive-adam", WARM | {"curvature": "adaptive"}, "14g", optimizer="adam", net="alike")
case("adaptive-adamw-groups", WARM | {"spread_refresh": 2}, "1g", optimizer="adamw-groups", net="vision")
case("adaptive-rmsprop", RHYTHM, "14", optimizer="rmsprop")
case("adaptive-nesterov", RHYTHM | {"factor_decay": 0.5}, "14", optimizer="nesterov", net="vision")
case("adam-eigen", RHYTHM | {"curvature": "adam-eigen"}, "14", optimizer="adam", net="vision")
case(
    "adam-eigen-clip",
    WARM | {"curvature": "adam-eigen", "rescale": "kl-clip", "kl_clip": 1e-8},
    "14g",
    optimizer="adamw-groups",
    net="alike",
    odd=True,
)
case(
    "bfloat16-bases",
    WARM | {"curvature": "adam-eigen", "basis_dtype": "bfloat16"},
    "14",
    optimizer="adamw",
    dtype=torch.float32,
)
case("kfac-eigen", KFAC, "14", net="vision")
case("kfac-cholesky", KFAC | {"solver": "cholesky", "norm_form": "full"}, "14g", net="vision", odd=True)
case("kfac-warm-eigen", KFAC | {"solver": "warm-eigen", "tf32": True}, "14g", net="alike")
case("ekfac", KFAC | {"curvature": "ekfac"}, "14", net="vision")
case("ekfac-warm", KFAC | {"curvature": "ekfac", "solver": "warm-eigen", "norm_form": "unit"}, "14", net="vision")

# Lengths and damping
case("norm", KFAC | {"rescale": "norm", "damping_mode": "relative", "solver": "cholesky"}, "14g", net="alike")
case("norm-global", KFAC | {"rescale": "norm-global", "norm_form": "diagonal"}, "14", net="vision", optimizer="adam")
case("norm-kl", KFAC | {"rescale": "norm-kl", "kl_clip": 1e-6, "solver": "cholesky"}, "14g")
case("kl-clip", KFAC | {"rescale": "kl-clip", "kl_clip": 1e-5}, "14", net="language")
case("no-rescale", KFAC | {"rescale": "none", "damping": 0.5, "solver": "cholesky"}, "1g", odd=True)
case(
    "schedules",
    KFAC
    | {
        "damping": lambda step: 0.1 / (1 + step),
        "norm_damping": lambda step: 0.2 / (1 + step),
        "factor_decay": lambda step: min(0.95, 1 - 1 / (1 + step)),
        "kl_clip": lambda step: 1e-4 / (1 + step),
        "norm_form": "unit",
    },
    "14",
    net="vision",
)
case("clip-schedule-graph", KFAC | {"kl_clip": lambda step: 1e-6 / (1 + step), "solver": "cholesky"}, "1g", net="alike")
case("levenberg-marquardt", KFAC | {"rescale": "none"}, "14", loop="lm", extra={"lr": 0.3})
case("quadratic", KFAC | {"rescale": "none", "fisher_loss": "cross-entropy", "damping": 0.1}, "1", loop="quadratic")
case(
    "quadratic-lm",
    KFAC | {"rescale": "none", "fisher": "exact", "fisher_loss": "mse"},
    "1",
    loop="quadratic",
    loss="mse",
    extra={"lm": True},
)

# Fishers, rows and terms
case("sampled", KFAC | {"fisher": "sampled", "fisher_loss": "cross-entropy"}, "14", net="vision")
case(
    "sampled-half",
    KFAC | {"fisher": "sampled", "fisher_loss": "bernoulli", "fisher_fraction": 0.5},
    "14",
    loss="bernoulli",
)
case("exact", KFAC | {"fisher": "exact", "fisher_loss": "cross-entropy"}, "14", net="vision")
case("exact-mse", KFAC | {"fisher": "exact", "fisher_loss": "mse", "curvature": "ekfac"}, "14", loss="mse")
case("tokens", KFAC | {"loss_terms": "token", "statistics_fraction": 0.5, "norm_form": "unit"}, "14", net="language")
case("terms-number", RHYTHM | {"loss_terms": 40, "weight_sharing": "reduce"}, "14", net="vision")
case("masked", KFAC | {"norm_form": "unit"}, "14", net="language", loop="masked")
case("batch-dim", KFAC | {"batch_dim": 1, "loss_terms": "token", "norm_form": "off"}, "14", net="language")
case("accumulate-mean", KFAC | {"accumulate": "mean"}, "14", micro=3, net="vision")
case("accumulate-sum", RHYTHM | {"accumulate": "sum"}, "14", micro=3)
case("accumulate-terms", KFAC | {"accumulate": "terms"}, "14", micro=2)
case("statistics-graph", KFAC | {"statistics_fraction": 0.25, "solver": "cholesky"}, "1g", net="alike", odd=True)

# Which factors, and when
case("left-layers", KFAC | {"max_dim": 20, "flattened": "off", "skip": ("0",)}, "14", net="vision")
case("flattened", RHYTHM | {"flattened": {"6": 6}, "solver": "warm-eigen"}, "14", net="vision")
case("flattened-auto", KFAC | {"max_dim": 20, "max_failures": 3}, "14", net="vision")
case("blocks", KFAC | {"block_dim": 3}, "14")
case("blocks-graph", KFAC | {"block_dim": 3, "solver": "cholesky"}, "1g", net="alike")
case("blocks-adaptive", WARM | {"block_dim": 3}, "14", optimizer="adamw")
case("warmup", {"curvature": "kfac", "warmup_refresh": (2, 8), "factor_interval": 2, "inverse_interval": 6}, "14")
case("warmup-growing", {"warmup_refresh": 1.6, "factor_interval": 1, "inverse_interval": 5}, "14", net="vision")
case("spread", KFAC | {"spread_refresh": 3, "solver": "cholesky"}, "1g", net="alike")
case("lag-threads", KFAC | {"inverse_lag": 2, "inverse_backend": "threads"}, "14", net="vision")
case("lag-inline", WARM | {"inverse_lag": 3, "inverse_backend": "inline"}, "14", optimizer="adamw")
STALE = {"staleness_min_rows": 64, "staleness_threshold": 0.5, "max_interval": 8}
case("stale-change", STALE | {"staleness": "change", "curvature": "kfac"}, "1")
case("stale-basis", STALE | {"staleness": "basis"}, "14", net="vision", optimizer="adamw")

# Ranks
for strategy in ("comm-opt", "sharded", "local", "replicated", "layer-wise", "factor-wise", "hybrid-opt", "mem-opt"):
    case(f"strategy-{strategy}", KFAC | {"strategy": strategy, "norm_form": "unit"}, "4", net="vision")
case("strategy-spd", KFAC | {"strategy": "spd", "solver": "cholesky"}, "4", net="wide")
case("strategy-cluster", RHYTHM | {"cluster": "cpu-2-cores"}, "4", net="wide")
case("workers", WARM | {"strategy": "hybrid-opt", "worker_fraction": 0.25}, "4", optimizer="adamw", net="vision")
case("replicated-factors", KFAC | {"replicate_factors": True, "strategy": "sharded"}, "4")
case("wire-bfloat16", KFAC | {"wire_dtype": "bfloat16", "strategy": "sharded"}, "4", net="vision")
case("wire-float16", RHYTHM | {"wire_dtype": "float16"}, "4")
case("wire-float32", RHYTHM | {"wire_dtype": "float32", "strategy": "sharded"}, "4", optimizer="adam")
case(
    "wire-rows",
    KFAC | {"wire_form": "rows", "replicas_may_differ": True, "patience": 60.0},
    "4",
    net="wide",
    extra={"batch": 16},
)
case("share-weights", KFAC | {"share": "weights", "strategy": "sharded"}, "4", net="vision")
case("share-weights-adam", RHYTHM | {"share": "weights", "strategy": "mem-opt"}, "4", optimizer="adamw")
case("overlap", KFAC | {"overlap": True}, "4", net="vision")
case("overlap-spd", RHYTHM | {"overlap": True, "fusion": "spd", "strategy": "spd"}, "4", net="wide")
case("fusion-optimal", KFAC | {"fusion": "optimal"}, "4", net="vision")
case("fusion-one", RHYTHM | {"fusion": "one", "overlap": True}, "4")
case("join", KFAC | {"strategy": "comm-opt"}, "4", loop="join")

# Loops and states
case("no-optimizer", RHYTHM | {"damping": 1e-2, "rescale": "kl-clip"}, "14", net="vision", loop="no-optimizer")
case("closure", KFAC, "14", loop="closure")
case("closed", RHYTHM, "14", loop="closed")
case("resume-kfac", KFAC | {"solver": "warm-eigen"}, "14", net="vision", resume={})
case("resume-adaptive", WARM, "14g", net="alike", resume={}, optimizer="adamw")
case("resume-factors", RHYTHM, "14", net="vision", resume={"decompositions": False}, optimizer="adam")
case("resume-lag", KFAC | {"inverse_lag": 3}, "14", resume={}, extra={"half": 9})
case("resume-weights", KFAC | {"share": "weights", "strategy": "sharded"}, "4", resume={}, optimizer="sgd")
case("resume-stale", STALE | {"staleness": "change"}, "1", resume={})


def pairs():
    """Every ``(case, way)``."""
    return [(name, way) for name, found in CASES.items() for way in found.ways]


# --- acted graphs: the one place that knows internals ---------------------------------------------------------

POOLS = ("GraphPool", "Pool")
"""Names that the class may have whose ``capture(function, device)`` returns a graph and what it found."""
WISHES = ("wants_graphs",)
"""Names that the function may have that says whether a runner takes steps from graphs."""


def _internal_modules():
    """Return all of dkfac's modules that the training uses."""
    apart = ("cli", "recipes", "measure", "report_page", "integrations", "__main__")
    for found in pkgutil.walk_packages(dkfac.__path__, "dkfac."):
        if not any(f".{part}" in found.name for part in apart):
            importlib.import_module(found.name)
    return [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "dkfac"]


def _tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [t for item in found or () for t in _tensors(item)]


class Acted:
    """What a captured graph does: a replay runs the function again, on the memory that it was captured with, and
    makes waste of what other graphs of the same memory had returned."""

    replays = 0

    def __init__(self, function, pool):
        self.function, self.pool, self.found, self.is_fresh = function, pool, function(), True
        pool.append(self)

    def replay(self):
        Acted.replays += 1
        mine = [tensor.clone() for tensor in _tensors(self.found)]
        for other in self.pool:
            if other is not self:
                for tensor in _tensors(other.found):
                    tensor.fill_(True if tensor.dtype == torch.bool else 12345.0)
        if not self.is_fresh:  # nothing runs while a real one is captured, but here it did
            mine = _tensors(self.function())
        self.is_fresh = False
        for old, new in zip(_tensors(self.found), mine, strict=True):
            old.copy_(new)


@contextlib.contextmanager
def acted_graphs():
    """Let steps be taken from acted graphs on the CPU, wherever the internals are that decide and capture."""
    pools = {}

    def capture(self, function, device):
        made = Acted(function, pools.setdefault(id(self), []))
        return made, made.found

    def wants_graphs(settings, *_):
        return getattr(settings, "settings", settings).cuda_graph  # older trees give the object that has them

    modules = _internal_modules()
    classes = {getattr(m, name) for m in modules for name in POOLS if hasattr(getattr(m, name, None), "capture")}
    changes = [(found, "capture", capture) for found in classes]
    wishes = [(module, name, wants_graphs) for module in modules for name in WISHES if hasattr(module, name)]
    assert changes, f"no class {POOLS} in dkfac: where are graphs captured?"
    assert wishes, f"no function {WISHES} in dkfac: who decides on graphs?"
    changes += [*wishes, (torch.cuda, "is_current_stream_capturing", lambda: False)]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    Acted.replays = 0
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


# --- ranks as threads -----------------------------------------------------------------------------------------


def on_threads(world_size, function):
    """Return ``[function(rank) for each rank]``, run at the same time on a threaded process group."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = _install_threaded_pg()
    store = dist.HashStore()
    results, errors = [None] * world_size, []

    def work(rank):
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        assert not any(thread.is_alive() for thread in threads), f"ranks hang; errors so far: {errors}"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        del world
    if errors:
        raise errors[0]
    return results


def average_gradients(model):
    """What DDP does: the mean over ranks."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(mean.view_as(g))


class Averager(Joinable):
    """Gradients' mean over ranks of which some have run out of batches."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def join_hook(self, **_):
        numel = sum(p.numel() for p in self.model.parameters())

        class Hook(JoinHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(numel, dtype=torch.float64))

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


# --- one run ---------------------------------------------------------------------------------------------------


def make_optimizer(kind, model, lr=None):
    lr = lr if lr is not None else 0.05 if kind in ("sgd", "nesterov") else 1e-2 if kind != "rmsprop" else 1e-3
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False))
    match kind:
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
        case "nesterov":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.8, nesterov=True)
        case "adam":  # where factors have no rank, bases follow rounding: eps is more than the gradient has there
            return torch.optim.Adam(model.parameters(), lr=lr, eps=1e-3, weight_decay=1e-3)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3)
        case "adamw-groups":
            groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": lr / 2}]
            return torch.optim.AdamW(groups, lr=lr, eps=1e-3)
        case "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=lr, momentum=0.5, eps=1e-3)
    raise ValueError(kind)


class Training:
    """One rank of a run. ``shared``: what ranks that are threads give each other beside torch.distributed."""

    def __init__(self, given, rank, world_size, shared, options):
        self.case, self.rank, self.world_size, self.shared = given, rank, world_size, shared
        self.options, self.losses, self.found, self.step = dict(options), [], {}, 0
        if given.loop == "lm" or given.extra.get("lm"):
            self.options["damping"] = dkfac.LevenbergMarquardt(0.1, every=2)
        self.begin()

    def begin(self):
        """Make a model, its optimizer and K-FAC."""
        self.model = build(self.case.net).to(self.case.dtype)
        self.optimizer = make_optimizer(self.case.optimizer, self.model, self.case.extra.get("lr"))
        attached = () if self.case.loop == "no-optimizer" else (self.optimizer,)
        self.kfac = dkfac.KFAC(self.model, *attached, **arranged(self.options))

    def batch(self):
        """Return this rank's part of a batch; labels follow from the inputs, so that there is something to learn."""
        size = self.case.extra.get("batch", BATCH)
        if self.case.odd and self.step in (8, 9):
            size //= 2
        generator = torch.Generator().manual_seed(1000 + self.step)
        shape = (size, *NETS[self.case.net][1])
        if self.case.net == "language":
            x = torch.randint(0, 9, shape, generator=generator)
            y = (x + torch.randint(0, 2, shape, generator=generator)) % 3
        else:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            y = (x.flatten(1)[:, :3] + 0.5 * torch.randn(size, 3, generator=generator, dtype=torch.float64)).argmax(1)
            x = x.to(self.case.dtype)
            if self.case.odd and self.step == 11:
                x = x * float("nan")
        share = size // self.world_size
        return (t[self.rank * share : (self.rank + 1) * share] for t in (x, y))

    def loss(self, output, y, reduction="mean"):
        if self.case.loss == "cross-entropy":
            return F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction=reduction)
        target = F.one_hot(y, 3).to(output)
        if self.case.loss == "mse":
            return F.mse_loss(output, target, reduction=reduction)
        return F.binary_cross_entropy_with_logits(output, target, reduction=reduction)

    def forward(self, x, y, reduction="mean"):
        if self.options.get("batch_dim") == 1:
            x, y = x.T, y.T
        output = self.model(x)
        return self.loss(output, y, reduction), output

    def backward(self, x, y):
        """Compute the gradients of this step, and their mean over ranks; returns the loss."""
        self.optimizer.zero_grad()
        if self.case.loop == "masked":
            mask = x > 0
            y = y.where(mask, torch.tensor(-100))
            self.kfac.set_terms(int(mask.sum()), mask)
        total, how = 0.0, self.options.get("accumulate", "mean")
        for part_x, part_y in zip(x.chunk(self.case.micro), y.chunk(self.case.micro), strict=True):
            loss = self.forward(part_x, part_y, "sum" if how == "terms" else "mean")[0]
            loss = loss / {"mean": self.case.micro, "sum": 1, "terms": len(y)}[how]
            loss.backward()
            total = total + loss.detach()
        if self.world_size > 1:
            average_gradients(self.model)
        return total

    def take_step(self):
        x, y = self.batch()
        if self.case.loop == "closure":
            loss = self.optimizer.step(lambda: self.backward(x, y))
        else:
            loss = self.backward(x, y)
            match self.case.loop:
                case "lm":
                    self.kfac.lm_step(loss, lambda: self.forward(x, y)[0])
                case "quadratic":
                    self.kfac.quadratic_step(lambda: self.forward(x, y))
                case "no-optimizer":
                    self.kfac.step(lr=0.05)
                    self.optimizer.step()
                case _:
                    self.optimizer.step()
        self.losses.append(float(loss))
        if self.case.odd:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.95

    def resume(self):
        """Go on in a new model, with a new optimizer and a new KFAC, from the states of these."""
        states = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        state = self.kfac.state_dict(gather=True, **self.case.resume)
        if self.rank == 0:
            self.shared["state"] = state
        if self.world_size > 1:
            dist.barrier()
        state = copy.deepcopy(self.shared["state"])
        self.kfac.close()
        self.begin()
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        self.kfac.load_state_dict(state)

    def train(self):
        half = self.case.extra.get("half", STEPS // 2)
        steps = (20, 12, 16, 7)[self.rank] if self.case.loop == "join" else STEPS
        averager = Averager(self.model)
        with Join([averager, self.kfac]) if self.case.loop == "join" else contextlib.nullcontext():
            for self.step in range(steps):
                if self.step == half and self.case.resume is not None:
                    self.resume()
                if self.step == half and self.case.loop == "closed":
                    self.kfac.close()
                if self.case.loop == "join":
                    Join.notify_join_context(averager)
                self.take_step()
                if self.step + 1 in SNAPSHOTS:
                    self.snapshot(f"after{self.step + 1:02d}.")
        return self.finish()

    def snapshot(self, prefix):
        tell(self.found, f"{prefix}parameter", dict(self.model.named_parameters()))
        tell(self.found, f"{prefix}factor", self.kfac.factors())

    def finish(self):
        """Return all that the run has come to, on this rank."""
        found = self.found
        tell(found, "losses", self.losses)
        tell(found, "buffer", dict(self.model.named_buffers()))
        for name, p in self.model.named_parameters():
            tell(found, f"parameter.{name}", p)
            tell(found, f"optimizer.{name}", dict(self.optimizer.state.get(p, {})))
        metrics = self.kfac.metrics()
        tell(found, "metrics", {name: value for name, value in metrics.items() if name not in TIMES})
        report = self.kfac.report()
        for name in ("delicate_layers", "strategy", "rank_memory_bytes", "transfers", "memory_bytes"):
            value = report[name]
            if name == "transfers":  # as a set: the order of a program is what tests/plan has tests for
                value = sorted(json.dumps(transfer, sort_keys=True) for transfer in value)
            tell(found, f"report.{name}", json.dumps(value, sort_keys=True))
        if self.world_size > 1:
            tell(found, "held", self.kfac.state_dict())
        if self.case.loop != "closed":  # whose process groups are gone
            tell(found, "state", self.kfac.state_dict(gather=True))
        self.kfac.close()
        return found


def tell(found, path, value):
    """Add tensors, numbers and, as hashes, strings to a flat dict, by their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in TIMES:
                tell(found, f"{path}.{key}", item)
    elif isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value):
        for i, item in enumerate(value):
            tell(found, f"{path}.{i}", item)
    elif isinstance(value, str):
        number = int.from_bytes(hashlib.sha256(value.encode()).digest()[:6], "big")
        found[path] = torch.tensor(float(number), dtype=torch.float64)
    elif value is not None:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        found[path] = tensor.detach().to(torch.float64).clone()


def run(name, way):
    """Return the result of a case, as a flat dict of float64 tensors; with ranks, "rank0." and so on come first."""
    given, shared = CASES[name], {}
    options = given.options | ({"cuda_graph": True} if way == "graphs" else {})
    with warnings.catch_warnings(), acted_graphs() if way == "graphs" else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        if way == "four":
            ranks = on_threads(RANKS, lambda rank: Training(given, rank, RANKS, shared, options).train())
            return {f"rank{rank}.{path}": t for rank, found in enumerate(ranks) for path, t in found.items()}
        found = Training(given, 0, 1, shared, options).train()
        if way == "graphs":
            tell(found, "replays", Acted.replays)
        return found
