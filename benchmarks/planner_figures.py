"""The figures of docs/planner.md: predicted against measured, and scaling curves. No GPU cluster was measured for them.

Scaling: constants of the published cluster (``spd-kfac-64``) with eight ranks per host; numbers of ranks other than 64
are extrapolated with the ring algorithm.
"""

import argparse
import json
import pathlib
import time

import matplotlib
from environment import write

from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS, work_of
from dkfac.plan.preset import load_cluster
from dkfac.plan.search import predict
from dkfac.plan.timeline import Span, Timeline
from dkfac.tools.charts import draw_gantt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = pathlib.Path(__file__).parent / "results"
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
STRATEGIES = ("replicated", "comm-opt", "sharded", "spd")


def scatter(path: pathlib.Path) -> dict:
    """Draw every strategy's predicted step against its measured one, with a band of 25%."""
    figure, ax = plt.subplots(figsize=(5.5, 5))
    errors = {}
    for source in sorted(RESULTS.glob("planner_network_*.json")):
        body = json.loads(source.read_text())
        for model, entry in body["models"].items():
            rows = [row for row in entry["strategies"].values() if "predicted" in row]
            label = f"{model}, {body['rate']}"
            ax.scatter([1e3 * r["measured"] for r in rows], [1e3 * r["predicted"] for r in rows], s=22, label=label)
            errors[label] = [row["predicted"] / row["measured"] - 1 for row in rows]
    low, high = ax.get_xlim()
    ends = [max(low, 1.0), high]
    ax.plot(ends, ends, color="black", linewidth=0.8)
    ax.fill_between(ends, [0.75 * e for e in ends], [1.25 * e for e in ends], color="grey", alpha=0.2, label="25%")
    ax.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return errors


def scaling(path: pathlib.Path, model: str, batch: int) -> dict:
    cluster = load_cluster("spd-kfac-64").with_hosts_of(8)
    shapes = list(MODELS[model]())
    work, layers = work_of(shapes, batch, cluster.costs), [shape.spec for shape in shapes]
    found: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for ranks in RANKS:
        for name in STRATEGIES:
            choices = Choices(strategy=name, solver="cholesky", factor_interval=10, inverse_interval=100)
            plan = make_plan(layers, ranks, choices, cluster, work)
            found[name].append(predict(plan, choices, False, cluster, work).seconds)
    figure, ax = plt.subplots(figsize=(5.5, 3.6))
    for name, seconds in found.items():
        ax.plot(RANKS, [1e3 * s for s in seconds], marker="o", markersize=3, label=name)
    ax.set(xscale="log", xlabel="ranks (64 measured by others, the rest extrapolated)", ylabel="predicted step, ms")
    ax.set_title(f"{model}, {batch} images a rank, factors every 10, inverses every 100", fontsize=9)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return found


def pictures(path: pathlib.Path, model: str) -> dict:
    """Draw a refreshing step on four hosts, predicted and measured, and return both by stage."""
    body = json.loads((RESULTS / "planner_network_4_hosts_1gbit_cpu.json").read_text())
    rows = {name: row for name, row in body["models"][model]["strategies"].items() if "measured_spans" in row}
    drawn, stages = [], {}
    for name, row in rows.items():
        for kind in ("predicted", "measured"):
            spans = tuple(Span(*span) for span in row[f"{kind}_spans"])
            timeline = Timeline(spans, max(span.end for span in spans))
            drawn.append((f"{name}, {kind}", timeline))
            stages[f"{name}, {kind}"] = {"seconds": timeline.seconds, "busy_rank_0": timeline.busy(0)}
    draw_gantt(drawn, path)
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent / "docs")
    parser.add_argument("--out", default="benchmarks/results/planner_figures.json")
    args = parser.parse_args()
    begin = time.perf_counter()
    errors = scatter(args.docs / "planner_scatter.png")
    curves = scaling(args.docs / "planner_scaling.png", "resnet152", 32)
    for label, found in errors.items():
        print(f"{label}: {sum(abs(e) <= 0.25 for e in found)} of {len(found)} strategies within 25%, "
              f"from {min(found):+.0%} to {max(found):+.0%}")  # fmt: skip
    stages = pictures(args.docs / "planner_gantt.png", "cnn")
    body = {"gantt": stages, "errors": errors, "ranks": RANKS, "scaling_resnet152_seconds": curves}
    write(args.out, body | {"seconds": time.perf_counter() - begin})


if __name__ == "__main__":
    main()
