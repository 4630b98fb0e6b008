"""Does the simulator predict a cluster it has not seen? The table of SPD-KFAC (ICDCS'21): 64 GPUs, three algorithms.

The published times of forward and backward, of gradient communication and of factor computation are inputs. The
constants of communication and inversion are fitted on ResNet-50's rows only; ResNet-152 is predicted.
"""

import argparse
import json
import math
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from dkfac.plan.cluster import Cluster, Line
from dkfac.plan.costs import Costs
from dkfac.plan.curves import Curve
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS, scaled, work_of
from dkfac.plan.program import expand
from dkfac.plan.simulate import Kind, simulate

INPUTS = {"resnet50": (132, 65, 212), "resnet152": (114, 159, 193)}
"""Milliseconds of forward and backward, exposed gradients, measuring factors."""
PUBLISHED = {
    "resnet50": {"D-KFAC": (170, 274, 0, 852.5), "MPD-KFAC": (170, 51, 134, 763.5), "SPD-KFAC": (98, 105, 64, 675.5)},
    "resnet152": {"D-KFAC": (439, 676, 0, 1580.7), "MPD-KFAC": (436, 54, 438, 1393.3),
                  "SPD-KFAC": (276, 281, 146, 1168.9)},
}  # fmt: skip
"""Milliseconds: factors' exposed communication, inversion, inverses' communication, total."""
ALGORITHMS = {"D-KFAC": ("replicated", False), "MPD-KFAC": ("factor-wise", False), "SPD-KFAC": ("spd", True)}
WORLD = 64
LATENCY = 9.29e-4
"""Of an all-reduce, as published."""


def pace() -> dict[str, Curve]:
    """Seconds of an operation on those GPUs, for plans of other models: ResNet-50's, at 32 images."""
    unit = work_of(MODELS["resnet50"](), 32, Costs(flop_seconds=1.0))
    passes, _, measuring = INPUTS["resnet50"]
    products = passes / 1e3 / (sum(unit.forward.values()) + sum(unit.backward.values()))
    factor = measuring / 1e3 / sum(unit.factors.values())
    return {name: Curve("polynomial", (0.0, x)) for name, x in
            (("products", products), ("factor", factor), ("precondition", products))}  # fmt: skip


PACE = pace()


def cluster(constants: dict[str, float]) -> Cluster:
    """The published cluster. Their inversion model, 3.64e-3 e^(4.77e-4 d), gives 651 ms for ResNet-50, which takes 274:
    at small dimensions it is far too dear. A start-up and the cube of the dimension fit all three algorithms.

    Transfers are hidden behind the forward pass and not behind the backward pass: the table shows gradients, whose 56
    ms would disappear behind a backward of 88, exposed in full, and the same holds for what is left of the factors.
    """
    inverse = Curve("power", (constants["inverse_latency"], constants["inverse_cube"], 3.0))
    reduce = Line(LATENCY, constants["reduce_element"] / 4)
    share = Line(constants["share_latency"], constants["share_element"] / 4)
    curves = {"cholesky": inverse, **PACE}
    costs = Costs(curves=curves, latency_seconds=share.latency, byte_seconds=share.byte_seconds)
    lines = {"all-reduce": {WORLD: reduce}, "broadcast": {WORLD: share}}
    return Cluster("spd-kfac-64", costs, between=lines, ranks_per_host=4, hidden=(1.0, 0.0))


def predict(model: str, algorithm: str, where: Cluster) -> tuple[float, float, float, float]:
    """Return the four columns in milliseconds."""
    passes, gradients, measuring = INPUTS[model]
    shapes, (strategy, overlap) = list(MODELS[model]()), ALGORITHMS[algorithm]
    work = scaled(shapes, passes / 1e3, measuring / 1e3)
    fusion = "optimal" if overlap else "one"
    choices = Choices(strategy=strategy, solver="cholesky", fusion=fusion, replicate_factors=True)
    plan = make_plan([shape.spec for shape in shapes], WORLD, choices, where, work)
    plain = type(work)(work.forward, work.backward, work.factors, reduces_gradients=False)
    kind = Kind(measures=True, decomposes=True, overlap=overlap)
    found = simulate(plan, where, plain, kind, program=expand(plan, broadcasts=True), keep=WORLD)
    network = found.network(0)
    inverting = max(found.busy(rank).get("decompose", 0.0) for rank in range(WORLD))
    columns = [1e3 * network.get("factors", (0, 0))[1], 1e3 * inverting]
    columns.append(1e3 * sum(network.get("decompositions", (0, 0))))
    return (*columns, passes + gradients + measuring + sum(columns))


def error(constants: dict[str, float]) -> float:
    where, total = cluster(constants), 0.0
    for algorithm, wanted in PUBLISHED["resnet50"].items():
        found = predict("resnet50", algorithm, where)
        total += sum((f / w - 1) ** 2 for f, w in zip(found, wanted, strict=True) if w)
    return total


def fit() -> dict[str, float]:
    """Return the constants that predict ResNet-50 best: one after the other is moved, by ever smaller steps."""
    best = {"reduce_element": 2e-9, "inverse_latency": 5e-4, "inverse_cube": 4e-13, "share_latency": 5e-4,
            "share_element": 1e-9}  # fmt: skip
    least, step = error(best), 0.3
    while step > 2e-3:
        moved = False
        for name in best:
            for factor in (math.exp(step), math.exp(-step)):
                trial = best | {name: best[name] * factor}
                if (value := error(trial)) < least:
                    best, least, moved = trial, value, True
        step = step if moved else step / 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/spd_table.json")
    args = parser.parse_args()
    begin = time.perf_counter()
    constants = fit()
    where, rows = cluster(constants), []
    print(f"{'':10} {'':9} {'factors':>12} {'inversion':>12} {'inverses':>12} {'total':>15}   (predicted / published)")
    for model, table in PUBLISHED.items():
        for algorithm, wanted in table.items():
            found = predict(model, algorithm, where)
            rows.append({"model": model, "algorithm": algorithm, "predicted_ms": found, "published_ms": wanted})
            cells = " ".join(f"{f:6.0f}/{w:<5.0f}" for f, w in zip(found, wanted, strict=True))
            print(f"{model:10} {algorithm:9} {cells} {found[3] / wanted[3] - 1:+.1%}")
    from environment import write

    seconds = time.perf_counter() - begin
    body = {"fitted_on": "resnet50", "constants": constants, "rows": rows, "seconds": seconds}
    write(args.out, body | {"cluster": json.loads(where.to_json())})


if __name__ == "__main__":
    main()
