"""``dkfac simulate``: predict the steps of one strategy, stage by stage, without running anything.

Input: a model, a cluster, a strategy. Output: the seconds of each stage, and a trace on request. Owns: nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from dkfac.config.settings import Settings, Solver, Strategy
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS, work_of
from dkfac.plan.search import cut_work, predict
from dkfac.plan.spec import cut_layer
from dkfac.tools.cli.plan import check_counts, read_batch, read_cluster, read_shapes, write_step


def add_simulate_command(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="predict the steps of one strategy, stage by stage, on a cluster", allow_abbrev=False,
        description="Simulates each kind of step of one strategy: compute, and hidden and exposed transfers.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", help=f"{', '.join(MODELS)}, or package.module:function, to be built on the meta device")
    add("--ranks", type=int, required=True)
    add("--strategy", default="comm-opt", choices=[s for s in get_args(Strategy) if s != "auto"])
    add("--cluster", default="guessed", help="a file written by `dkfac measure`, or a preset")
    add("--gpus-per-node", type=int, help="ranks per host; default: the cluster's")
    add("--batch", type=int, default=32, help="examples per rank")
    add("--input", help="shape of the input, for example 128,3,224,224, for package.module:function")
    add("--tokens", action="store_true", help="the input is token indices")
    add("--overlap", action="store_true", help="send factors during forward and backward")
    add("--factor-interval", type=int, default=10)
    add("--inverse-interval", type=int, default=100)
    add("--solver", default="eigen", choices=get_args(Solver))
    add(
        "--block-dim",
        type=_block_dim,
        default=Settings().block_dim,
        metavar="N",
        help="factors in pieces of at most N features, or none: whole factors (default: %(default)s, as in KFAC)",
    )
    add("--trace", type=Path, help="write a trace of the refresh step for Perfetto")
    add("--gantt", type=Path, help="draw the refresh step, as .png or .svg")
    parser.set_defaults(run=_run)


def _block_dim(text: str) -> int | None:
    if text.lower() == "none":
        return None
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _run(given: argparse.Namespace) -> int:
    check_counts(given)
    cluster, shapes = read_cluster(given), read_shapes(given, Settings(block_dim=None))
    whole = [shape.spec for shape in shapes]
    specs = [cut_layer(spec, given.block_dim) for spec in whole]
    work = cut_work(work_of(shapes, read_batch(given), cluster.costs), whole, specs)
    choices = Choices(
        strategy=given.strategy, solver=given.solver, factor_interval=given.factor_interval,
        inverse_interval=given.inverse_interval, fusion="optimal" if given.overlap else "one",
        block_dim=given.block_dim,
    )  # fmt: skip
    plan = make_plan(specs, given.ranks, choices, cluster, work)
    found = predict(plan, choices, given.overlap, cluster, work, keep=3)
    what = f"{given.model}, {found.name}, {given.ranks} ranks, cluster {cluster.name}"
    print(f"{what}: {1e3 * found.seconds:.1f} ms per step")
    for name, number, timeline in found.steps:
        busy = sorted(timeline.busy(0).items(), key=lambda item: -item[1])
        exposed = [(stage, seconds) for stage, (_, seconds) in timeline.network(0).items() if seconds > 5e-5]
        stages = [f"{stage} {1e3 * seconds:.1f}" for stage, seconds in busy]
        stages += [f"{stage} {1e3 * seconds:.1f} exposed" for stage, seconds in exposed]
        print(f"  {name}, {number} of {given.inverse_interval}: {1e3 * timeline.seconds:.1f} ms: {', '.join(stages)}")
    write_step(given, f"{given.model}, {found.name}, refresh step", found.steps[0][2])
    return 0
