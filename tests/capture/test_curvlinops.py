"""The factors of Linear and Conv2d equal those of curvlinops-for-pytorch, an independent implementation.

Conventions. curvlinops divides A by the rows (expand) or the examples (reduce), and G by the terms of the loss after
undoing the mean, as we do, so the factors are compared one by one. There is one exception: for the *empirical*
Fisher of MSELoss(reduction="mean") it multiplies the loss by sqrt(C), C = outputs per term, before it measures (the
Fisher of a Gaussian whose negative log-likelihood is the squared error divided by C), so that its G is C times that
of the gradients a training step really has. We measure the latter. For "type-2" its C is in the Hessian, as in ours.
curvlinops folds the bias in with ``separate_weight_and_bias=False`` and averages over the groups of a convolution,
which is another approximation: convolutions here have one group.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers_exact import EXACT, assert_close, randn
from torch import nn

from dkfac import KFAC

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # linear_operator uses torch.jit.script, which torch deprecates
    KFACLinearOperator = pytest.importorskip("curvlinops").KFACLinearOperator

CLASSES = 3


class Head(nn.Module):
    """``[N, C, H, W]`` or ``[N, S, C]`` to one vector per example, without parameters."""

    def forward(self, x):
        return x.flatten(2).mean(2) if x.ndim == 4 else x.mean(1)


class ClassesSecond(nn.Module):
    """torch's cross-entropy, and so curvlinops, wants ``[N, classes, S]``."""

    def forward(self, x):
        return x.movedim(-1, 1)


def vectors():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False)), randn(6, 4)


def images():
    model = nn.Sequential(
        nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding="same", bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(36, CLASSES),
    )
    return model, randn(6, 2, 4, 7)


def pooled_images():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, CLASSES, 1), Head()), randn(6, 2, 4, 5)


def pooled_tokens():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES), Head()), randn(6, 4, 4)


def sequences():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)), randn(6, 4, 4)


BATCH = [vectors, images, pooled_images, pooled_tokens]


def labels_for(output, loss):
    """Class numbers for the cross-entropy, real numbers for the squared error."""
    return torch.randint(CLASSES, output.shape[:-1]) if loss == "cross-entropy" else randn(*output.shape)


def theirs(model, x, target, loss, fisher, sharing):
    model = copy.deepcopy(model)
    if loss == "cross-entropy" and target.ndim > 1:
        model.append(ClassesSecond())
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss() if loss == "cross-entropy" else nn.MSELoss(),
        list(model.parameters()),
        [(x, target)],
        check_deterministic=False,
        fisher_type={"empirical": "empirical", "exact": "type-2"}[fisher],
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    operator.compute_kronecker_factors()
    scale = CLASSES if loss == "mse" and fisher == "empirical" else 1
    return {
        name: {"A": A, "G": operator._gradient_covariances[name] / scale}
        for name, A in operator._input_covariances.items()
    }


def ours(model, x, target, loss, fisher, sharing, loss_terms):
    options = {"fisher": fisher, "fisher_loss": loss, "weight_sharing": sharing, "loss_terms": loss_terms}
    with KFAC(model, **(EXACT | options)) as kfac:
        output = model(x)
        if loss == "mse":
            F.mse_loss(output, target).backward()
        else:
            F.cross_entropy(output.flatten(0, -2), target.flatten()).backward()
        kfac.step()
        return kfac.factors()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize(("network", "loss_terms"), [*((n, "batch") for n in BATCH), (sequences, "token")])
def test_factors_equal_those_of_curvlinops(network, loss_terms, loss, fisher, sharing):
    torch.manual_seed(0)
    model, x = network()
    model.double()
    with torch.no_grad():
        target = labels_for(model(x), loss)
    expected = theirs(model, x, target, loss, fisher, sharing)
    actual = ours(model, x, target, loss, fisher, sharing, loss_terms)
    assert list(actual) == list(expected)
    for name, factors in expected.items():
        assert_close(actual[name]["A"], factors["A"])
        assert_close(actual[name]["G"], factors["G"])
        product = torch.kron(factors["A"], factors["G"])
        assert_close(torch.kron(actual[name]["A"], actual[name]["G"]), product)
