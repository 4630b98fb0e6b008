"""``dkfac simulate``: one strategy's steps, stage by stage, without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from dkfac.config.settings import Solver, Strategy
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS, work_of
from dkfac.plan.search import predict
from dkfac.tools.cli.plan import check_counts, read_batch, read_cluster, read_shapes, write_step


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="one strategy's steps, stage by stage, on a cluster", allow_abbrev=False,
        description="Simulates the kinds of steps of one strategy: work, and transfers hidden and waited for.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", help=f"{', '.join(MODELS)}, or package.module:function, which is built on the meta device")
    add("--ranks", type=int, required=True)
    add("--strategy", default="comm-opt", choices=[s for s in get_args(Strategy) if s != "auto"])
    add("--cluster", default="guessed", help="a file of `dkfac measure`, or a preset")
    add("--gpus-per-node", type=int, help="ranks on a host, instead of the cluster's")
    add("--batch", type=int, default=32, help="examples of a rank")
    add("--input", help="shape of the input, as in 128,3,224,224, for package.module:function")
    add("--tokens", action="store_true", help="the input is numbers of tokens")
    add("--overlap", action="store_true", help="factors travel during forward and backward")
    add("--factor-interval", type=int, default=10)
    add("--inverse-interval", type=int, default=100)
    add("--solver", default="eigen", choices=get_args(Solver))
    add("--trace", type=Path, help="write the refreshing step for Perfetto")
    add("--gantt", type=Path, help="draw it, as .png or .svg")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    check_counts(given)
    cluster, shapes = read_cluster(given), read_shapes(given)
    work = work_of(shapes, read_batch(given), cluster.costs)
    choices = Choices(
        strategy=given.strategy, solver=given.solver, factor_interval=given.factor_interval,
        inverse_interval=given.inverse_interval, fusion="optimal" if given.overlap else "one",
    )  # fmt: skip
    plan = make_plan([shape.spec for shape in shapes], given.ranks, choices, cluster, work)
    found = predict(plan, choices, given.overlap, cluster, work, keep=3)
    print(
        f"{given.model}, {found.name}, {given.ranks} ranks, cluster {cluster.name}: {1e3 * found.seconds:.1f} ms a step"
    )
    for name, number, timeline in found.steps:
        busy = sorted(timeline.busy(0).items(), key=lambda item: -item[1])
        waited = [(stage, exposed) for stage, (_, exposed) in timeline.network(0).items() if exposed > 5e-5]
        stages = [f"{stage} {1e3 * seconds:.1f}" for stage, seconds in busy]
        stages += [f"{stage} {1e3 * seconds:.1f} waited for" for stage, seconds in waited]
        print(f"  {name}, {number} of {given.inverse_interval}: {1e3 * timeline.seconds:.1f} ms: {', '.join(stages)}")
    write_step(given, f"{given.model}, {found.name}, refreshing step", found.steps[0][2])
    return 0
