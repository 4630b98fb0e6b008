"""How much memory does K-FAC add to a model? Bytes that it keeps between steps, by kind, without taking a step.

Computed from the layers that K-FAC preconditions. It keeps nothing else between steps, except with ``cuda_graph=True``
buffers as large as the gradients. ``one_copy``: all factors as full float32 squares, the unit of the other figures.
With ``curvature="adam-eigen"``, K-FAC stores Adam's moments of these layers instead of the optimizer, so they add
nothing.
"""

import argparse
import sys

import torch
from environment import write

import dkfac

FLOAT = 4


def gpt2() -> tuple[torch.nn.Module, list[str]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), ["lm_head", "transformer.wte", "transformer.wpe"]


def figures(model: torch.nn.Module, skip: list[str]) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {}
    every = sum(p.numel() for p in model.parameters())
    for name, options in {
        "adam-eigen": {"curvature": "adam-eigen"},
        "adam-eigen, bases in bfloat16": {"curvature": "adam-eigen", "experimental": {"basis_dtype": "bfloat16"}},
        "cholesky": {"solver": "cholesky"},
    }.items():
        with dkfac.KFAC(model, optimizer, skip=skip, announce=False, **options) as kfac:
            factors = [factor for layer in kfac.layers for factor in layer.spec.factors]
            square = sum(factor.num_elements for factor in factors)
            values = sum(factor.eigen_elements - factor.num_elements for factor in factors if factor.form == "dense")
            each = 2 if kfac.settings.experimental.basis_dtype == "bfloat16" else FLOAT
            entry = {"running": FLOAT * square, "decompositions": each * square}
            if "curvature" in options:
                entry["decompositions"] += FLOAT * values
            entry["total"] = sum(entry.values())
            entry["copies"] = entry["total"] / (FLOAT * square)
            found[name] = entry
            ours = sum(layer.spec.grad_elements for layer in kfac.layers)
    base = {"parameters": every, "parameters_of_kfac": ours, "one_copy": FLOAT * square, "weights": FLOAT * every}
    return base | {"adamw_state": 2 * FLOAT * every, "kfac": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/memory_gpt2.json")
    args = parser.parse_args()
    result = figures(*gpt2())
    for name, entry in result["kfac"].items():
        print(
            f"{name:32} {entry['total'] / 1e9:.2f} GB, {entry['copies']:.2f} copies of {result['one_copy'] / 1e9:.2f}"
        )
    write(args.out, result)


if __name__ == "__main__":
    sys.exit(main())
