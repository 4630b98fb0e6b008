"""Draw docs/cifar_resnet32.png from the committed results of benchmarks/cifar.py."""

import json
import pathlib
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
RUNS = [
    ("cifar_resnet32_h200_rescale_norm.json", "sgd 12", "SGD, 12 epochs", "#9a9a9a", "-"),
    ("cifar_resnet32_h200_rescale_norm.json", "sgd 16", "SGD, 16 epochs", "#9a9a9a", "--"),
    ("cifar_resnet32_h200.json", "global 10/100 3e-4", "K-FAC (defaults), 12 epochs", "#c1440e", "-"),
]


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for file, label, name, colour, style in RUNS:
        runs = [r for r in json.loads((HERE / "results" / file).read_text())["runs"] if r["config"]["label"] == label]
        mean = [100 * fmean(values) for values in zip(*(r["curve"] for r in runs), strict=True)]
        for run in runs:
            axes.plot(range(1, len(mean) + 1), [100 * v for v in run["curve"]], color=colour, lw=0.7, alpha=0.4)
        test = 100 * fmean(r["test"] for r in runs)
        axes.plot(range(1, len(mean) + 1), mean, style, color=colour, lw=2.2, label=f"{name}: test {test:.1f}%")
    axes.set(xlabel="epochs", ylabel="validation accuracy (%)", ylim=(20, 88))
    axes.set_title("CIFAR-10, ResNet-32, batch 1,024: the same lr and schedule (mean of 2 seeds)", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = HERE.parent / "docs" / "cifar_resnet32.png"
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
