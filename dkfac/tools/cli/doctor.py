"""``dkfac doctor``: describe this machine or, for a model, what K-FAC would precondition and what it would cost.

Input: options of the command line. Output: text. Owns: nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from typing import Any

from dkfac.tools.cli.plan import check_counts, not_called, parse_shape, read_batch, read_cluster, read_model

PACKAGES = {
    "triton": "GPU kernels",
    "matplotlib": "plots",
    "PIL": "recipes that read images (pillow)",
    "sklearn": "digits-cnn, autoencoder and the demo (scikit-learn)",
    "transformers": "its Conv1D layers",
    "tensorboard": "--tensorboard",
}


def add_doctor_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="describe this machine, or what K-FAC would do with a model", allow_abbrev=False,
        description="Without a model: versions, devices, backends and packages. With a model, as "
        "package.module:function: which layers would be preconditioned and why the others would not, memory, and the "
        "expected step time relative to training without K-FAC.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", nargs="?", help="package.module:function, to be built on the meta device")
    add("--input", help="shape of the input, for example 128,3,224,224: for the expected step time")
    add("--tokens", action="store_true", help="the input is token indices")
    add("--ranks", type=int, default=1, metavar="N")
    add("--cluster", default=None, help="costs: a file written by `dkfac measure`, or a preset (default: by device)")
    add("--factor-interval", type=int, default=10)
    add("--inverse-interval", type=int, default=100)
    add("--solver", choices=("eigen", "cholesky", "warm-eigen"), help="default: by device, as in KFAC")
    parser.set_defaults(run=_run, gpus_per_node=None, batch=32)


def _run(given: argparse.Namespace) -> int:
    import torch

    check_counts(given)
    given.on_gpu = given.cluster is None and torch.cuda.is_available()
    if given.cluster is None:
        given.cluster = "h200" if torch.cuda.is_available() else "cpu-2-cores"
    print(machine() if given.model is None else examine(given))
    return 0


def machine() -> str:
    """Return versions, devices, backends and packages, one per line."""
    import torch

    from dkfac import __version__, distributed

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"dkfac {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
        f"cores: {os.cpu_count()}, torch threads: {torch.get_num_threads()}",
        f"GPUs: {', '.join(devices) if devices else 'none that torch can use; training runs on the CPU'}",
        f"backends: {', '.join(distributed.backends()) or 'none'}",
    ]
    for name, use in PACKAGES.items():
        is_there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {'installed' if is_there else f'not installed; needed for {use}'}")
    return "\n".join(lines)


def examine(given: argparse.Namespace) -> str:
    """Return the table of a model's layers, K-FAC's memory per rank and, given the input shape, the expected step
    time."""
    from dkfac.config.resolve import needs_no_eigenvalues
    from dkfac.config.settings import Settings
    from dkfac.factors.layer_state import LayerState
    from dkfac.plan.make import Choices
    from dkfac.plan.models import work_of
    from dkfac.plan.search import search
    from dkfac.runtime import report
    from dkfac.tools.measure.model import shapes_of

    cluster, settings = read_cluster(given), Settings(solver=given.solver or "eigen")
    shape = None if given.input is None else parse_shape(given.input)
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
        lines.append(f"memory of K-FAC: about {total / 1e6:.1f} MB on one rank")
        lines.append("for the expected step time, set --input to the shape of a batch, for example 128,3,224,224")
        return "\n".join(lines)
    shapes = shapes_of(model, shape, settings, tokens=given.tokens)
    lines += not_called(layers, shapes)
    work = work_of(shapes, read_batch(given), cluster.costs)
    best = search([shape.spec for shape in shapes], given.ranks, cluster, work, choices)[0]
    own = sum(work.forward.values()) + sum(work.backward.values())
    lines.append(f"memory of K-FAC: about {best.memory_bytes / 1e6:.1f} MB per rank on {given.ranks}, {best.name}")
    lines.append(
        f"expected step time on {cluster.name}: {best.seconds / own:.2f} times that without K-FAC (forward and "
        f"backward {1e3 * own:.1f} ms, with K-FAC {1e3 * best.seconds:.1f} ms), factors every {given.factor_interval}, "
        f"inverses every {given.inverse_interval} steps, {given.solver}. This is a prediction; to measure it, use "
        f"`dkfac compare --script`"
    )
    return "\n".join(lines)
