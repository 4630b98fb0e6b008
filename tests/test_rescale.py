"""Layers that K-FAC does not precondition keep their gradient, whatever the others are scaled by."""

import pytest
import torch
from helpers_capture import attach, batch, mean_loss, mlp

import dkfac


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "kl-clip", "none"])
def test_a_layer_that_was_never_measured_keeps_its_raw_gradient(rescale):
    """Its weight is used without calling the module, as in window attention."""
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, rescale=rescale, damping=1e-6)

    def forward(inputs):
        hidden = model[1](model[0](inputs))
        hidden = torch.nn.functional.linear(hidden, model[2].weight, model[2].bias)
        return model[4](model[3](hidden))

    model.forward = forward
    mean_loss(model(x), y).backward()
    raw = gradients(model)
    with pytest.warns(UserWarning, match="not called as modules.*: 2"):
        kfac.step(lr=0.1)
    after = gradients(model)
    for name in raw:
        unchanged = torch.equal(raw[name], after[name])
        assert unchanged == name.startswith("2."), name


def test_the_global_length_is_that_of_the_preconditioned_layers():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, rescale="norm-global", skip=["2"])
    mean_loss(model(x), y).backward()
    raw = gradients(model)
    kfac.step()
    after = gradients(model)

    def length(found, skipped):
        return torch.cat([g.reshape(-1) for n, g in found.items() if n.startswith("2.") == skipped]).norm()

    torch.testing.assert_close(length(after, False), length(raw, False))
    assert torch.equal(length(after, True), length(raw, True))
    directions = [torch.cat([g.reshape(-1) for g in found.values()]) for found in (raw, after)]
    assert torch.nn.functional.cosine_similarity(*directions, dim=0) < 0.999


def test_the_default_matches_the_global_length():
    assert dkfac.Settings().rescale == "auto"
    assert dkfac.Settings(curvature="kfac").rescale == "norm-global"
    assert dkfac.KFAC(torch.nn.Linear(2, 2), announce=False).settings.rescale == "norm-global"
