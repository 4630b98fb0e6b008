"""At an optimizer's usual learning rate the one line is not worse than the optimizer alone: part of the benchmark."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
never_worse = pytest.importorskip("never_worse", reason="scikit-learn has the digits")


@pytest.mark.parametrize("pair", never_worse.QUICK.split(","))
def test_the_loss_is_never_above_the_optimizers_alone_and_below_it_at_the_end(pair):
    """Held-out loss at 10, 25, 50 and 100% of the steps, one seed; the benchmark has 26 pairs and three."""
    found = never_worse.compare(pair, 1)
    assert found["errors"] == []
    assert max(found["excess"]["kfac"]) < never_worse.TOLERANCE, found["losses"]
    assert found["excess"]["kfac"][-1] < 0, found["losses"]
