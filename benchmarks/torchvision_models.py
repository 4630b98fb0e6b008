"""Do all 24 torchvision classifiers train with K-FAC? 20 steps each on one fixed batch.

A model passes if no step raises and the mean loss of the last five steps is below that of the first five. With
``--sgd`` the same steps are also taken without K-FAC.
Images and labels are random: the benchmark checks that K-FAC runs and the loss decreases, not what is learned.
"""

import argparse
import time
import traceback

import torch
import torch.nn.functional as F
import torchvision
from environment import write

import dkfac

NAMES = [
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "squeezenet1_1",
    "densenet121",
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "resnet18",
    "resnet50",
    "wide_resnet50_2",
    "resnext50_32x4d",
    "mnasnet0_5",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "regnet_y_400mf",
    "regnet_x_400mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
]


def build(name: str) -> torch.nn.Module:
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, num_classes=100, **options)


def loss_of(output, labels):
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, labels)
    auxiliary = [value for key, value in output._asdict().items() if key != "logits" and value is not None]
    return F.cross_entropy(output.logits, labels) + sum(0.3 * F.cross_entropy(a, labels) for a in auxiliary)


def train(name: str, args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    device = torch.device(args.device)
    size = 299 if name == "inception_v3" else 224
    model = build(name).to(device).train()
    images = torch.randn(args.batch, 3, size, size, device=device)
    labels = torch.randint(0, 100, (args.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    kfac = dkfac.KFAC(model, optimizer, settings=dkfac.Settings(announce=False))
    total = sum(p.numel() for p in model.parameters())
    begin = time.perf_counter()
    losses = steps(model, optimizer, images, labels, args)
    seconds = time.perf_counter() - begin
    metrics = kfac.metrics()
    measured = {name for name, factors in kfac.factors().items() if factors}
    share = sum(layer.spec.grad_elements for layer in kfac.layers if layer.name in measured) / total
    unmeasured = [layer.name for layer in kfac.layers if layer.name not in measured]
    large = [f"{item.name}: {item.reason}" for item in kfac.left if item.num_parameters > 0.01 * total]
    return {
        "passed": sum(losses[-5:]) < sum(losses[:5]) and all(bool(torch.isfinite(p).all()) for p in model.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "preconditioned_share": share,
        "layers": len(measured),
        "layers_not_called_as_modules": unmeasured,
        "left_over_1_percent": large,
        "skipped_batches": metrics["skipped_batches"],
        "fallbacks": {k: v for k, v in metrics.items() if k.startswith("fallbacks") and v},
        "seconds": seconds,
        **({"sgd_last_loss": plain(name, args, images, labels)} if args.sgd else {}),
    }


def steps(model, optimizer, images, labels, args: argparse.Namespace) -> list[float]:
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=args.bf16):
            loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(name: str, args: argparse.Namespace, images, labels) -> float:
    """Return the last loss of the same steps without K-FAC."""
    torch.manual_seed(0)
    model = build(name).to(images.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return steps(model, optimizer, images, labels, args)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sgd", action="store_true", help="also train without K-FAC")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="benchmarks/results/torchvision_models.json")
    args = parser.parse_args()
    results = {}
    for name in args.models:
        try:
            results[name] = train(name, args)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        print(name, results[name], flush=True)
        torch.cuda.empty_cache()
        passed = sum(r["passed"] for r in results.values())
        settings = dkfac.Settings().describe()
        write(args.out, {"lr": args.lr, "steps": args.steps, "kfac": settings, "passed": passed, "models": results})
    print(f"{passed} of {len(results)} models train")


if __name__ == "__main__":
    main()
