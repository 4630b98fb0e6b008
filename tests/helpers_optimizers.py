"""Optimizers for runs with and without graphs."""

import torch


def optimizer_of(model, options):
    """Return SGD; for Adam's steps AdamW or, with L2, Adam, and biases that do not decay."""
    if options.get("curvature") != "adam-eigen":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-3}]
    kind = torch.optim.Adam if options.pop("l2", False) else torch.optim.AdamW
    return kind(groups, lr=1e-3, eps=1e-3)  # where factors have no rank, bases follow rounding
