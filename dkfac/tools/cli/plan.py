"""``dkfac plan``: predict and rank the strategies for a model on a cluster, and recommend one.

Input: a model, a cluster, the number of ranks. Output: a table and a recommendation. Owns: nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from dkfac.config.settings import Settings, Solver, WireDtype
from dkfac.plan.cluster import Cluster
from dkfac.plan.make import Choices
from dkfac.plan.models import MODELS, Shape, work_of
from dkfac.plan.preset import PRESETS, load_cluster
from dkfac.plan.search import Candidate, search
from dkfac.plan.timeline import Timeline

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_plan_command(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict and rank the strategies for a model on a cluster",
        description="Predicts the mean step time, K-FAC's memory and its transfers for every strategy, without running "
        "anything.",
    )
    add = parser.add_argument
    add("model", help=f"{', '.join(MODELS)}, or package.module:function, to be built on the meta device")
    add("--ranks", type=int, required=True)
    add(
        "--cluster",
        default="guessed",
        help=f"a file written by `dkfac measure`, or one of {', '.join(PRESETS)}, guessed",
    )
    add("--gpus-per-node", type=int, help="ranks per host; default: the cluster's")
    add("--batch", type=int, default=32, help="examples per rank; with --input, its first number")
    add("--input", help="shape of the input, for example 128,3,224,224, for package.module:function")
    add("--tokens", action="store_true", help="the input is token indices")
    add("--memory", help="memory per rank for factors and decompositions, for example 40GB")
    add("--factor-interval", type=int, default=10)
    add("--inverse-interval", type=int, default=100)
    add("--solver", default="eigen", choices=get_args(Solver))
    add("--wire-dtype", choices=get_args(WireDtype), help="also try this precision for communication")
    add(
        "--block-dim",
        type=int,
        action="append",
        default=[],
        help="also try factors in diagonal blocks of at most this size; can be repeated; default: only whole factors",
    )
    add(
        "--inverse-lag",
        type=int,
        action="append",
        default=[],
        help="also try decompositions in the background over this many steps, if there are idle cores or a GPU; can be "
        "repeated",
    )
    add("--top", type=int, default=12, help="number of strategies to show")
    add("--trace", type=Path, help="write a trace of the best plan's refresh step for Perfetto")
    add("--gantt", type=Path, help="draw the refresh step, as .png or .svg")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    check_counts(given)
    if given.top < 1:
        raise ValueError(f"--top {given.top}: must be 1 or more")
    cluster, batch = read_cluster(given), read_batch(given)
    shapes = read_shapes(given, Settings(block_dim=None))  # the search cuts them
    choices = Choices(
        solver=given.solver, factor_interval=given.factor_interval, inverse_interval=given.inverse_interval
    )
    wires = (None,) if given.wire_dtype is None else (None, given.wire_dtype)
    layers, work = [shape.spec for shape in shapes], work_of(shapes, batch, cluster.costs)
    budget = None if given.memory is None else parse_bytes(given.memory)
    if any(not 0 < lag <= given.inverse_interval for lag in given.inverse_lag):
        raise ValueError("--inverse-lag must be from 1 to --inverse-interval")
    if any(dim < 1 for dim in given.block_dim):
        raise ValueError(f"--block-dim {min(given.block_dim)}: must be 1 or more")
    found = search(
        layers,
        given.ranks,
        cluster,
        work,
        choices,
        memory_bytes=budget,
        wire_dtypes=wires,
        block_dims=(None, *given.block_dim),
        inverse_lags=(0, *given.inverse_lag),
    )
    print(_ranking_table(found[: given.top], given, cluster, batch))
    print(_recommendation(found, cluster, given.ranks))
    timeline = found[0].steps[0][2]
    write_step(given, f"{given.model}, {found[0].name}, refresh step", timeline)
    return 0


def check_counts(given: argparse.Namespace) -> None:
    if min(given.ranks, given.factor_interval, given.inverse_interval) < 1 or (
        given.inverse_interval % given.factor_interval
    ):
        raise ValueError(
            "--ranks and the intervals must be 1 or more, and --inverse-interval a multiple of --factor-interval"
        )


def write_step(given: argparse.Namespace, title: str, timeline: Timeline) -> None:
    """Write a step as a trace (``--trace``) and as a picture (``--gantt``), if requested."""
    if given.trace is not None:
        given.trace.write_text(timeline.to_chrome())
        print(f"wrote {given.trace}: open it in Perfetto")
    if given.gantt is not None:
        from dkfac.tools.charts import draw_gantt

        draw_gantt([(title, timeline)], given.gantt)
        print(f"wrote {given.gantt}")


def read_cluster(given: argparse.Namespace) -> Cluster:
    cluster = Cluster("guessed") if given.cluster == "guessed" else load_cluster(given.cluster)
    return cluster if given.gpus_per_node is None else cluster.with_hosts_of(given.gpus_per_node)


def read_shapes(given: argparse.Namespace, settings: Settings) -> list[Shape]:
    if given.model in MODELS:
        return list(MODELS[given.model]())
    if ":" not in given.model:
        raise ValueError(f"no model {given.model!r}: one of {', '.join(MODELS)}, or package.module:function")
    if given.input is None:
        raise ValueError(f"{given.model} needs --input, the shape of a batch, for example 128,3,224,224")
    from dkfac.tools.measure.model import shapes_of

    shape = parse_shape(given.input)
    model, layers, _ = read_model(given.model, settings)
    shapes = shapes_of(model, shape, settings, tokens=given.tokens)
    for line in not_called(layers, shapes):
        print(f"dkfac {given.command}: {line}", file=sys.stderr)
    return shapes


def read_model(where: str, settings: Settings) -> tuple[Any, list[Any], list[Any]]:
    """Return a user's model on the meta device, the layers that K-FAC preconditions, and the other modules. Raises
    ValueError if there are no such layers."""
    from dkfac.layers.find import find_layers, unwrap
    from dkfac.runtime.attach import check_layers
    from dkfac.tools.measure.model import build_on_meta

    model = build_on_meta(where)
    try:
        layers, left = find_layers(unwrap(model), settings, None, meta=True)
        check_layers(layers, left, ())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return model, layers, left


def not_called(layers: Iterable[Any], shapes: Iterable[Shape]) -> list[str]:
    """Return a line about the layers that the forward pass did not call; an empty list if it called all."""
    seen = {shape.spec.name for shape in shapes}
    names = [layer.name for layer in layers if layer.name not in seen]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    what = "not called in the forward pass, so not included in memory and times"
    return [f"{what}: {', '.join(names[:5])}{more}"] if names else []


def read_batch(given: argparse.Namespace) -> int:
    batch: int = given.batch if given.input is None else parse_shape(given.input)[0]
    if batch < 1:
        raise ValueError(f"--batch {batch}: must be 1 or more")
    return batch


def parse_shape(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"--input {text!r} is not a shape such as 128,3,224,224")
    return numbers


def parse_bytes(text: str) -> int:
    """Return the number of bytes of an amount such as ``40GB``."""
    digits = text.rstrip("kKmMgGtTbB")
    unit = text[len(digits) :].upper()
    try:
        amount = int(float(digits) * UNITS[unit if unit.endswith("B") or not unit else f"{unit}B"])
    except (KeyError, ValueError, OverflowError):
        amount = 0
    if amount < 1:
        raise ValueError(f"--memory {text!r} is not an amount such as 40GB or 800MB")
    return amount


def _ranking_table(found: list[Candidate], given: argparse.Namespace, cluster: Cluster, batch: int) -> str:
    width = max(len(one.name) for one in found)
    hosts = f"{min(given.ranks, cluster.ranks_per_host)} per host"
    lines = [
        f"{given.model} on {given.ranks} ranks ({hosts}), {batch} examples each, cluster {cluster.name}, "
        f"{given.solver}, factors every {given.factor_interval}, inverses every {given.inverse_interval} steps",
        f"{'':{width + 4}} {'ms/step':>10} {'exposed':>9} {'hidden':>9} {'GB/rank':>10} {'MB/step':>10}",
    ]
    for number, one in enumerate(found, 1):
        hidden, exposed = one.network()
        lines.append(
            f"{number:3} {one.name:{width}} {1e3 * one.seconds:10.1f} {1e3 * exposed:9.1f} {1e3 * hidden:9.1f} "
            f"{one.memory_bytes / 1e9:10.2f} {one.step_bytes / 1e6:10.1f}"
        )
    return "\n".join(lines)


def _recommendation(found: list[Candidate], cluster: Cluster, ranks: int) -> str:
    """Return the recommended settings, the reason, and which of the costs were not measured."""
    best, choices = found[0], found[0].choices
    settings = [f"strategy={choices.strategy!r}", f"solver={choices.solver!r}"]
    settings += [] if choices.worker_fraction is None else [f"worker_fraction={choices.worker_fraction:g}"]
    settings += ["experimental={'overlap': True}"] if best.overlap else []
    settings += [] if choices.wire_dtype is None else [f"wire_dtype={choices.wire_dtype!r}"]
    settings.append(f"block_dim={choices.block_dim}")
    settings += [f"inverse_lag={choices.inverse_lag}"] if choices.inverse_lag else []
    lines = [f"recommended: dkfac.KFAC(model, optimizer, {', '.join(settings)})"]
    exact = next((f for f in found if f.choices.block_dim is None and not f.choices.inverse_lag), None)
    if exact is not None and exact is not best:
        more = 1e3 * (exact.seconds - best.seconds)
        lines.append(f"block_dim and inverse_lag change results; without them, {exact.name} takes {more:.1f} ms more")
    timeline = best.steps[0][2]
    busy, network = timeline.busy(0), timeline.network(0)
    stages = [f"{stage} {1e3 * value:.1f}" for stage, value in sorted(busy.items(), key=lambda item: -item[1])]
    stages += [f"{stage} {1e3 * both[1]:.1f} exposed" for stage, both in network.items() if both[1] > 0]
    lines.append(f"its refresh step on rank 0, ms: {', '.join(stages)}")
    others = [f for f in found[1:] if f.plan.strategy != best.plan.strategy]
    if others:
        other = others[0]
        waits = 1e3 * (other.network()[1] - best.network()[1])
        more = 1e3 * (other.seconds - best.seconds)
        lines.append(
            f"reason: the next, {other.name}, takes {more:.1f} ms more, {waits:+.1f} ms of it waiting for transfers"
        )
    if cluster.costs.curves and best.plan.solver not in cluster.costs.curves:
        lines.append(f"the cost of solver={best.plan.solver!r} was not measured on this cluster: it is an estimate")
    if not cluster.within and not cluster.between:
        lines.append("no link of this cluster was measured: the figures are estimates; to measure, use `dkfac measure`")
    elif ranks > 1 and not cluster.is_measured("all-reduce", ranks, one_host=ranks <= cluster.ranks_per_host):
        lines.append(f"collectives of {ranks} ranks were not measured: they are extrapolated with the ring algorithm")
    return "\n".join(lines)
