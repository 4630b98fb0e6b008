"""Draw docs/cifar_optimizers.png from the committed results of benchmarks/cifar_optimizers.py.

Upper row: validation accuracy during training against epochs; lower row: against seconds, with separately measured step
times. Lines: means over the seeds; K-FAC with three quarters of the epochs, the others with all of them. Dots: median
final test accuracy, with minimum and maximum; rings: the same for other numbers of epochs.
"""

import json
import pathlib
import sys
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
SHOWN = {
    "sgd": ("SGD", "#6b6b6b", 1.0),
    "adamw": ("AdamW", "#b8a02e", 1.0),
    "muon": ("Muon", "#2e7ab8", 1.0),
    "kfac": ("K-FAC", "#c1440e", 0.75),
    "adam-eigen": ("K-FAC with AdamW", "#7a3fa0", 0.75),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "cifar_optimizers_h200"
    found = json.loads((HERE / "results" / f"{name}.json").read_text())
    rows, times = found["table"], found["times"]
    cases = list(dict.fromkeys(key.rsplit(" ", 2)[0] for key in rows))
    figure, every = plt.subplots(2, len(cases), figsize=(4.2 * len(cases), 6.4), layout="constrained", squeeze=False)
    for case, (above, below) in zip(cases, every.T, strict=True):
        network, batch = (int(part) for part in case.removeprefix("resnet").split(" batch "))
        for optimizer, (title, colour, fraction) in SHOWN.items():
            row = rows.get(f"{case} {optimizer} x{fraction:g}")
            if row is None:
                continue
            same = {"network": network, "batch": batch, "optimizer": optimizer, "epochs": row["epochs"]}
            same |= {key: row[key] for key in ("lr", "decay", "damping", "kfac") if key in row}
            runs = [r for r in found["runs"] if same.items() <= r["config"].items() and "curve" in r]
            curve = [100 * fmean(values) for values in zip(*(r["curve"] for r in runs), strict=True)]
            per_epoch, time = row["steps"] / row["epochs"], times.get(f"{network} {batch} {optimizer}")
            scales = [(above, [float(n) for n in range(1, len(curve) + 1)], row["epochs"])]
            if time is not None:
                late = time["first_seconds"] - time["first_steps"] * time["step_ms"] / 1e3
                seconds = [late + n * per_epoch * time["step_ms"] / 1e3 for n in range(1, len(curve) + 1)]
                scales.append((below, seconds, row["seconds"]))
            for axes, places, end in scales:
                axes.plot(places, curve, color=colour, lw=1.8, label=title)
                low, high = 100 * row["tests"][0], 100 * row["tests"][-1]
                axes.plot([end, end], [low, high], color=colour, lw=1)
                axes.plot([end], [100 * row["median"]], "o", color=colour, ms=5)
            for key, other in rows.items():
                if key.startswith(f"{case} {optimizer} x") and other is not row:
                    ring = {"marker": "o", "ms": 5, "mfc": "none", "color": colour}
                    above.plot([other["epochs"]], [100 * other["median"]], **ring)
                    below.plot([other["seconds"]], [100 * other["median"]], **ring)
        sgd = rows.get(f"{case} sgd x1")
        for axes in (above, below):
            if sgd is not None:
                axes.axhline(100 * sgd["median"], color="#6b6b6b", lw=0.8, ls="--")
                top = max(row["tests"][-1] for key, row in rows.items() if key.startswith(f"{case} "))
                axes.set_ylim(100 * sgd["median"] - 12, 100 * top + 1)
            axes.grid(axis="y", alpha=0.3)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        above.set_title(f"ResNet-{network}, batch {batch:,}", fontsize=10)
        above.set_xlabel("epochs")
        below.set_xlabel("seconds")
    for axes in every[:, 0]:
        axes.set_ylabel("accuracy (%)")
    every[0, 0].legend(frameon=False, fontsize=8)
    out = HERE.parent / "docs" / "cifar_optimizers.png"
    figure.savefig(out, dpi=120)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
