"""What a step of several ranks adds to an ordinary one is a number of operations for each width, not for each layer."""

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import LOCK, average_in_one
from helpers_ranks import on_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dkfac import KFAC

FIXED = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4, "solver": "warm-eigen"}
MEASURES, REFRESHES, ORDINARY = 10, 12, 11
OF_A_LAYER = 2
"""One operation for each factor of a layer says whether its decomposition is valid."""
VIEWS = (
    "aten::promote_types", "aten::view", "aten::select", "aten::slice", "aten::split", "aten::unbind", "aten::detach",
    "aten::alias", "aten::as_strided", "aten::_unsafe_view", "aten::diagonal", "aten::transpose",
)  # fmt: skip
"""Operations that launch nothing."""


class Counter(TorchDispatchMode):
    """Counts what would be launched on a device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.name().startswith(VIEWS)
        return func(*args, **(kwargs or {}))


def counts(rank, num_layers, **options):
    """The operations of a step of each kind, in ``optimizer.step()``."""
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    KFAC(model, optimizer, **FIXED, **options)
    found = []
    for step in range(13):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        average_in_one(model)
        counter = Counter()
        with counter:
            optimizer.step()
        found.append(counter.number)
    return found


@pytest.mark.parametrize("options", [{}, {"block_dim": 4}, {"wire_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("strategy", ["replicated", "comm-opt"])
def test_a_measuring_step_adds_as_many_operations_for_many_layers_as_for_few(strategy, options):
    def added(num_layers):
        ranks = on_threads(2, lambda rank: counts(rank, num_layers, strategy=strategy, **options))
        return [found[MEASURES] - found[ORDINARY] for found in ranks]

    assert added(12) == added(8)


def test_a_refresh_adds_hardly_more_operations_for_many_layers_than_for_few():
    def added(num_layers):
        ranks = on_threads(2, lambda rank: counts(rank, num_layers, strategy="comm-opt"))
        return [found[REFRESHES] - found[MEASURES] for found in ranks]

    few, many = added(8), added(12)
    assert all(after <= before + 4 * OF_A_LAYER for before, after in zip(few, many, strict=True))
