"""Are the planner's predictions right? Predicted and measured step times, with hosts in network namespaces.

The hosts are those of ``network.py``. ``dkfac measure`` runs first: links by collective, linear algebra on rank 0
alone, how much ranks slow each other down on shared cores, and how much of a transfer overlaps with compute. The
model's own passes and the measuring of factors are timed on rank 0 alone. Then the step of each strategy is predicted,
and measured in alternating blocks.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time

import network as net
import torch
import torch.distributed as dist
import torch.nn.functional as F
from environment import write

import dkfac
from dkfac.comm.groups import Groups, only
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import scaled
from dkfac.plan.search import predict
from dkfac.plan.simulate import Work
from dkfac.tools.measure.compute import seconds_of
from dkfac.tools.measure.machine import measure_cluster
from dkfac.tools.measure.model import shapes_of
from dkfac.tools.measure.record import Recorder

STRATEGIES = ["comm-opt", "sharded", "replicated", "mem-opt", "spd", "layer-wise", "factor-wise", "hybrid-opt"]
CPU = torch.device("cpu")


def own_work(model: str, groups: Groups, args: argparse.Namespace) -> Work:
    """Return a rank's own work, timed on rank 0 alone."""
    alone, module = only(groups), net.build(model)
    shapes = shapes_of(net.build(model), (net.BATCH, 1, 28, 28), dkfac.Settings())
    told = [0.0] * 3
    if groups.rank == 0:
        x, y = torch.randn(net.BATCH, 1, 28, 28), torch.randint(0, 10, (net.BATCH,))
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

        def passes() -> None:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()

        told[0] = seconds_of(passes, CPU, 31)
        told[2] = seconds_of(optimizer.step, CPU, 31)
        with dkfac.KFAC(module, process_group=alone, solver=args.solver, factor_interval=1, announce=False) as kfac:
            for step in range(25):
                if step == 5:
                    before, begin = kfac.report()["stage_seconds"], time.perf_counter()
                passes()
                kfac.step()
            total = (time.perf_counter() - begin) / 20
            stages = {k: (v - before.get(k, 0.0)) / 20 for k, v in kfac.report()["stage_seconds"].items()}
        told[1] = stages["capture"]
        told[2] += max(0.0, total - told[0] - sum(stages.values()))  # hooks and bookkeeping
    vector = torch.tensor(told, dtype=torch.float64)
    dist.broadcast(vector, 0)
    both, measuring, rest = vector.tolist()
    work = scaled(shapes, both, measuring)
    return Work(work.forward, work.backward, work.factors, optimizer=rest)


def run_rank(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    begin = time.perf_counter()
    cluster = measure_cluster(CPU, ranks_per_host=1, say=lambda text: print(text, file=sys.stderr, flush=True))
    cost = time.perf_counter() - begin
    models = {}
    print(f"measured in {cost:.0f} s: {cluster.slots} slots, hidden {cluster.hidden}", file=sys.stderr, flush=True)
    for model in args.models.split(","):
        groups = Groups()
        work = own_work(model, groups, args)
        shapes = shapes_of(net.build(model), (net.BATCH, 1, 28, 28), dkfac.Settings())
        layers = [shape.spec for shape in shapes]
        rows = {}
        for name in args.strategies.split(","):
            choices = Choices(strategy=name, solver=args.solver, factor_interval=args.factor_interval,
                              inverse_interval=args.inverse_interval)  # fmt: skip
            plan = make_plan(layers, world, choices, cluster, work)
            found = predict(plan, choices, False, cluster, work)
            steps = [{"kind": kind, "count": n, "seconds": t.seconds, "busy": t.busy(0), "network": t.network(0)}
                     for kind, n, t in found.steps]  # fmt: skip
            rows[name] = {"predicted": found.seconds, "steps": steps}
            if name in args.record.split(","):
                drawn = predict(plan, choices, False, cluster, work, keep=world).steps[0][2]
                rows[name]["predicted_spans"] = [dataclasses.astuple(span) for span in drawn.spans]
        torch.manual_seed(1000 + rank)
        batches = [(torch.randn(net.BATCH, 1, 28, 28), torch.randint(0, 10, (net.BATCH,))) for _ in range(8)]
        runners = {config: net.Runner(config, model, args) for config in ["sgd", *rows]}
        for runner in runners.values():
            runner.block(batches, args.inverse_interval)
            runner.seconds = []
        order = list(runners.values())
        for _ in range(args.rounds):
            for runner in order:
                runner.block(batches, args.inverse_interval)
            order.append(order.pop(0))
        for config, runner in runners.items():
            blocks = [max(ranks) for ranks in zip(*net.gathered(runner.seconds), strict=True)]
            stages = net.gathered(runner.kfac.report()["stage_seconds"] if runner.kfac else {})
            rows.setdefault(config, {})["measured"] = statistics.median(blocks)
            rows[config] |= {"blocks": blocks, "stages_rank_0": stages[0]}
            if config in args.record.split(","):
                kfac = runner.kfac.instruments()
                with Recorder(kfac.timer, kfac.transport.gather, runner.model, runner.optimizer) as recorder:
                    runner.block(batches, 1)  # which refreshes
                for recorded in recorder.timelines():
                    rows[config]["measured_spans"] = [dataclasses.astuple(span) for span in recorded.spans]
            if runner.kfac:
                runner.kfac.close()
        passes = sum(work.forward.values()) + sum(work.backward.values())
        own = {"passes": passes, "measuring": sum(work.factors.values()), "rest": work.optimizer}
        models[model] = {"strategies": rows, "work": own}
        groups.close()
    if rank == 0:
        show(models, args)
        body = {"hosts": world, "rate": args.rate, "measure_seconds": cost, "batch_per_rank": net.BATCH}
        kept = {key: value for key, value in vars(args).items() if key not in ("out", "set")}
        write(args.out, kept | body | {"models": models, "cluster": json.loads(cluster.to_json())})
    dist.barrier()
    dist.destroy_process_group()


def show(models: dict, args: argparse.Namespace) -> None:
    for model, entry in models.items():
        rows = {name: row for name, row in entry["strategies"].items() if "predicted" in row}
        known = {key: f"{1e3 * value:.1f}" for key, value in entry["work"].items()}
        print(f"{model} at {args.rate}: ms {known}; SGD {1e3 * entry['strategies']['sgd']['measured']:.1f}")
        for name, row in sorted(rows.items(), key=lambda item: item[1]["measured"]):
            print(f"  {name:12} predicted {1e3 * row['predicted']:7.1f} ms, measured {1e3 * row['measured']:7.1f}: "
                  f"{row['predicted'] / row['measured'] - 1:+.0%}")  # fmt: skip
        chosen = min(rows, key=lambda name: rows[name]["predicted"])
        best = min(row["measured"] for row in rows.values())
        print(f"  auto: {chosen}, {rows[chosen]['measured'] / best - 1:+.1%} of the best measured", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--rate", default="1gbit")
    add("--burst", default="256kb")
    add("--models", default="mlp,cnn")
    add("--strategies", default=",".join(STRATEGIES))
    add("--factor-interval", type=int, default=1)
    add("--inverse-interval", type=int, default=10)
    add("--solver", default="cholesky")
    add("--rounds", type=int, default=8)
    add("--record", default="comm-opt,sharded", help="strategies of which one refreshing step is recorded")
    add("--out", default="benchmarks/results/planner_network.json")
    args = parser.parse_args()
    args.wire_dtype, args.set = None, []
    if net.IN_HOST in os.environ:
        run_rank(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with net.network(args.hosts, args.rate, args.burst) as names:
            net.launch(names, __file__)
    except net.Unable as reason:
        print(f"skip: {reason}")


if __name__ == "__main__":
    main()
