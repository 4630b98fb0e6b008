"""Statistics of layers that tensor parallelism splits: of all features, as if the layer were whole.

Input: a call of a layer, whose input and output gradient may be DTensors. Output: the same call with whole tensors,
recorded by the collector. Owns: nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dkfac.capture.calls import Blocks
from dkfac.capture.collector import Collector
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.sharded import ShardedLayer
from dkfac.layers.tensor_parallel import whole_of


class GatheringCollector(Collector):
    """Collects the features of inputs and output gradients from the ranks that split a layer. All of them run the same
    backward pass, so they do so in the same order."""

    def _record(
        self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool, source: int, more: Blocks
    ) -> None:
        super()._record(index, whole_of(x), whole_of(g), sizes, batch_stats, source, more)


def make_collector(layers: list[Layer], settings: Settings, scaler: Any, **how: Any) -> Collector:
    """Return the collector that layers need."""
    is_sharded = any(isinstance(layer, ShardedLayer) for layer in layers)
    return (GatheringCollector if is_sharded else Collector)(layers, settings, scaler, **how)
