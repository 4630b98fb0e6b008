"""Send updates, or updated weights, from the ranks that computed them to the others.

Input: this rank's updates or weights. Output: those of the other ranks. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.comm.transport import Transport
from dkfac.layers.layer import Layer
from dkfac.plan.transfer import Part


def share_gradients(transport: Transport, updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the preconditioned gradients of layers that not every rank preconditions; zeros if none was sent."""
    shapes = {layer.name: layer.grad_shape for layer in transport.plan.layers}
    received = transport.share("gradients", lambda part: updates.get(part.layer))
    return {name: flat.view(shapes[name]) for (name, _), flat in received.items()}


def share_weights(transport: Transport, layers: dict[str, Layer]) -> None:
    """Send the weights of the layers that this rank stepped, and copy those of other ranks in place. Collective."""

    def value(part: Part) -> Tensor:
        return torch.cat([p.reshape(-1) for p in layers[part.layer].parameters()])

    with torch.no_grad():
        for (name, _), flat in transport.share("weights", value).items():
            position = 0
            for parameter in layers[name].parameters():
                parameter.copy_(flat[position : position + parameter.numel()].view_as(parameter))
                position += parameter.numel()
