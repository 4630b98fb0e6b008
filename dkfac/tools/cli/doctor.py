"""``dkfac doctor``: what this machine has; for a model, what would be preconditioned and what it would cost."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from typing import Any

from dkfac.tools.cli.plan import _numbers, check_counts, read_batch, read_cluster, read_model, unseen

PACKAGES = {
    "triton": "kernels on a GPU",
    "matplotlib": "pictures",
    "PIL": "recipes that read images (pillow)",
    "sklearn": "digits-cnn, autoencoder and the demo (scikit-learn)",
    "transformers": "its Conv1D layers",
    "tensorboard": "--tensorboard",
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="what this machine has; what K-FAC would do with a model", allow_abbrev=False,
        description="Without a model: versions, devices, back ends, packages. With one, as package.module:function: "
        "what would be preconditioned and why not the rest, memory, and the expected step against one without K-FAC.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", nargs="?", help="package.module:function, which is built on the meta device")
    add("--input", help="shape of the input, as in 128,3,224,224: for the expected step")
    add("--tokens", action="store_true", help="the input is numbers of tokens")
    add("--ranks", type=int, default=1, metavar="N")
    add("--cluster", default=None, help="what work costs: a file of `dkfac measure` or a preset (default: by device)")
    add("--factor-interval", type=int, default=10)
    add("--inverse-interval", type=int, default=100)
    add("--solver", choices=("eigen", "cholesky", "warm-eigen"), help="default: by device, as K-FAC's own")
    parser.set_defaults(run=run, gpus_per_node=None, batch=32)


def run(given: argparse.Namespace) -> int:
    import torch

    check_counts(given)
    given.on_gpu = given.cluster is None and torch.cuda.is_available()
    if given.cluster is None:
        given.cluster = "h200" if torch.cuda.is_available() else "cpu-2-cores"
    print(machine() if given.model is None else examine(given))
    return 0


def machine() -> str:
    """Return what there is, a line each."""
    import torch

    from dkfac import __version__, distributed

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"dkfac {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
        f"cores: {os.cpu_count()}, threads of torch: {torch.get_num_threads()}",
        f"GPUs: {', '.join(devices) if devices else 'none that torch can use; steps run on the CPU'}",
        f"back ends: {', '.join(distributed.backends()) or 'none'}",
    ]
    for name, use in PACKAGES.items():
        is_there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {'there' if is_there else f'missing; it is for {use}'}")
    return "\n".join(lines)


def examine(given: argparse.Namespace) -> str:
    """Return the table of a model's layers, memory per rank and, with the input's shape, the expected step."""
    from dkfac.config.resolve import needs_no_eigenvalues
    from dkfac.config.settings import Settings
    from dkfac.factors.layer_state import LayerState
    from dkfac.plan.make import Choices
    from dkfac.plan.models import work_of
    from dkfac.plan.search import search
    from dkfac.runtime import report
    from dkfac.tools.measure.model import shapes_of

    cluster, settings = read_cluster(given), Settings(solver=given.solver or "eigen")
    shape = None if given.input is None else _numbers(given.input)
    model, layers, left = read_model(given.model, settings)
    if given.solver is None:
        is_fast = given.on_gpu and needs_no_eigenvalues(settings, model.parameters())
        given.solver = "cholesky" if is_fast else "eigen"
    lines = [report.table(layers, left, {la.name: LayerState(1, {"": None}) for la in layers})]  # type: ignore[dict-item]
    choices = Choices(
        solver=given.solver, factor_interval=given.factor_interval, inverse_interval=given.inverse_interval
    )
    if shape is None:
        total = sum(report.state_bytes(layer, settings) for layer in layers)
        lines.append(f"K-FAC's own memory: about {total / 1e6:.1f} MB on one rank")
        lines.append("for the expected step say --input, the shape of a batch, as in 128,3,224,224")
        return "\n".join(lines)
    shapes = shapes_of(model, shape, settings, tokens=given.tokens)
    lines += unseen(layers, shapes)
    work = work_of(shapes, read_batch(given), cluster.costs)
    best = search([shape.spec for shape in shapes], given.ranks, cluster, work, choices)[0]
    own = sum(work.forward.values()) + sum(work.backward.values())
    lines.append(f"K-FAC's own memory: about {best.memory_bytes / 1e6:.1f} MB on a rank of {given.ranks}, {best.name}")
    lines.append(
        f"expected step on {cluster.name}: {best.seconds / own:.2f} times that without K-FAC (forward and backward "
        f"{1e3 * own:.1f} ms, with K-FAC {1e3 * best.seconds:.1f} ms), factors every {given.factor_interval}, inverses "
        f"every {given.inverse_interval} steps, {given.solver}. A prediction: `dkfac compare --script` measures"
    )
    return "\n".join(lines)
