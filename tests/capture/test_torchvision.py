"""torchvision's own ViT and Swin, where it can be imported: their share, and factors of what functions apply."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dkfac

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

EVERY_STEP = {"announce": False, "factor_interval": 1, "inverse_interval": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b_16", "swin_t"])
def test_more_than_99_percent_of_the_parameters_beside_embeddings_and_head_are_preconditioned(name):
    model = getattr(torchvision.models, name)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kfac = dkfac.KFAC(model, optimizer, announce=False)
    beside = ("head", "class_token", "encoder.pos_embedding")
    counted = {n: p.numel() for n, p in model.named_parameters() if not n.startswith(beside) and "bias_table" not in n}
    covered = sum(layer.spec.grad_elements for layer in kfac.layers if not layer.name.startswith("head"))
    assert covered / sum(counted.values()) > 0.99


def made(name):
    torch.manual_seed(0)
    if name == "ViT":
        model = torchvision.models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=3)
        nn.init.normal_(model.heads.head.weight)  # it is zero, and so would be all gradients below
        return model.double()
    options = {"stochastic_depth_prob": 0.0, "num_classes": 3}
    return torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], **options).double()


def applications(model, x, y):
    """Return weight, input and output gradient of each application of ``F.linear``, whoever calls it."""
    linear, found = F.linear, []

    def watched(x, weight, bias=None):
        output = linear(x, weight, bias)
        if output.requires_grad:
            output = output.view_as(output)
            output.retain_grad()
            found.append((weight, x.detach(), output))
        return output

    F.linear = watched
    try:
        F.cross_entropy(model(x), y).backward()
    finally:
        F.linear = linear
    model.zero_grad()
    return [(w, x.reshape(-1, x.shape[-1]), out.grad.reshape(-1, out.shape[-1])) for w, x, out in found]


@pytest.mark.parametrize("name", ["ViT", "Swin"])
def test_factors_have_the_direction_of_what_f_linear_is_given(name):
    """Their size is the oracle's business: ``test_functional`` has models of this structure."""
    model, (x, y) = made(name), (torch.randn(6, 3, 32, 32).double(), torch.arange(6) % 3)
    found = applications(model, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = dkfac.KFAC(model, optimizer, curvature="kfac", damping=0.1, **EVERY_STEP)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    names = {p.data_ptr(): n.removesuffix(".weight").replace("_weight", "") for n, p in model.named_parameters()}
    factors, number = kfac.factors(), 0
    for weight, rows, gradients in found:
        layer = names[weight.data_ptr()]
        rows = nn.functional.pad(rows, (0, 1), value=1.0)
        blocks = {"": gradients} if layer in factors else zip((".q", ".k", ".v"), gradients.chunk(3, -1), strict=True)
        for suffix, part in dict(blocks).items():
            for key, expected in (("A", rows.mT @ rows), ("G", part.mT @ part)):
                factor = factors[layer + suffix][key]
                expected = expected[: len(factor), : len(factor)]
                torch.testing.assert_close(factor / factor.trace(), expected / expected.trace(), rtol=1e-10, atol=1e-14)
                number += 1
    assert number == {"ViT": 26, "Swin": 36}[name]
