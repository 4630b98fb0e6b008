"""fisher="exact": the Gauss-Newton curvature, against torch's own Jacobians and against the oracle."""

import copy

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from helpers_exact import EXACT, PLAIN, assert_close, assert_factors, assert_solved, oracle_direction, randn
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from dkfac import KFAC

EXACT_MSE = {"fisher": "exact", "fisher_loss": "mse"}
EXACT_CE = {"fisher": "exact", "fisher_loss": "cross-entropy"}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def factors_after_one_step(model, x, loss, **options):
    with KFAC(model, **(PLAIN | options)) as kfac:
        model.zero_grad()
        loss(model(x)).backward()
        kfac.step()
        return kfac.factors()


def mse_to_noise(output):
    return F.mse_loss(output, torch.randn_like(output))


def cross_entropy_to_noise(output):
    labels = torch.randint(output.shape[-1], output.shape[:-1])
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def gauss_newton(model, name, x, loss):
    """Return J' H J of the mean loss for one layer's ``[weight, bias]``, stacked column by column."""
    module = model.get_submodule(name)
    weight = module.weight.detach()
    is_norm = weight.ndim == 1
    parts = [weight.reshape(1, -1) if is_norm else weight.T]
    if module.bias is not None:
        parts.append(module.bias.detach()[None])
    theta = torch.cat(parts)  # rows: inputs, then the bias; for norms: gammas, betas

    def output(vector):
        rows = vector.reshape(theta.shape)
        new = {f"{name}.weight": rows[0] if is_norm else rows[: weight.shape[1]].T}
        if module.bias is not None:
            new[f"{name}.bias"] = rows[-1]
        return functional_call(model, new, (x,)).flatten()

    J = jacobian(output, theta.flatten())
    logits = output(theta.flatten()).detach()
    H = hessian(loss, logits)
    return J.T @ H @ J


def mean_square(logits):
    return (logits**2).mean()


@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 3)])
def test_a_deep_linear_network_has_its_gauss_newton_blocks(shape):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    x = randn(*shape)
    loss_terms = "batch" if len(shape) == 2 else "token"
    blocks = {name: gauss_newton(model, name, x, mean_square) for name in ("0", "1", "2")}
    factors = factors_after_one_step(model, x, mse_to_noise, loss_terms=loss_terms, **EXACT_MSE)
    for name, block in blocks.items():
        assert_close(torch.kron(factors[name]["A"], factors[name]["G"]), block)


def test_the_empirical_fisher_of_a_deep_linear_network_is_something_else():
    """What the test above is able to see."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x = randn(6, 3)
    block = gauss_newton(model, "0", x, mean_square)
    factors = factors_after_one_step(model, x, mse_to_noise)["0"]
    assert (torch.kron(factors["A"], factors["G"]) - block).norm() > 0.1 * block.norm()


class Pooled(nn.Module):
    """A deep linear network that averages its positions before the last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.last(self.first(x).mean(dim=1))


def test_a_pooled_linear_network_has_its_gauss_newton_blocks_under_reduce():
    model, x = Pooled().double(), randn(6, 5, 3)
    blocks = {name: gauss_newton(model, name, x, mean_square) for name in ("first", "last")}
    factors = factors_after_one_step(model, x, mse_to_noise, weight_sharing="reduce", **EXACT_MSE)
    for name, block in blocks.items():
        assert_close(torch.kron(factors[name]["A"], factors[name]["G"]), block)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_full_factor_of_a_norm_layer_is_its_gauss_newton_block(bias, loss):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=bias), nn.Tanh(), nn.Linear(4, 3)).double()
    x, labels = randn(6, 3), torch.randint(3, (6,))
    exact = mean_square if loss == "mse" else lambda logits: F.cross_entropy(logits.reshape(6, 3), labels)
    block = gauss_newton(model, "1", x, exact)
    backward = mse_to_noise if loss == "mse" else cross_entropy_to_noise
    factors = factors_after_one_step(
        model, x, backward, experimental={"norm_form": "full"}, fisher="exact", fisher_loss=loss
    )
    assert_close(factors["1"]["F"], block)


def test_an_mse_over_maps_counts_every_output_of_an_example():
    """Output ``[N, S, C]`` and a mean over the batch's examples: S * C columns."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = randn(4, 5, 3)
    block = gauss_newton(model, "0", x, mean_square)
    factors = factors_after_one_step(model, x, mse_to_noise, experimental={"norm_form": "full"}, **EXACT_MSE)
    assert_close(factors["0"]["F"], block)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 3)])
def test_cross_entropy_factors_equal_the_oracles(shape, sharing):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = randn(*shape)
    loss_terms = "batch" if len(shape) == 2 else "token"
    terms = x[..., 0].numel()
    expected = ref.exact_factors(model, x, ["0", "2"], "cross_entropy", terms, sharing)
    options = {"loss_terms": loss_terms, "weight_sharing": sharing}
    actual = factors_after_one_step(model, x, cross_entropy_to_noise, **options, **EXACT_CE)
    assert_factors(actual, expected)


def test_convolution_factors_equal_the_oracles():
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 3)).double()
    x = randn(5, 4, 3, 3)
    expected = ref.exact_factors(model, x, ["0", "3"], "cross_entropy", 5, "expand")
    assert_factors(factors_after_one_step(model, x, cross_entropy_to_noise, **EXACT_CE), expected)


def test_the_factors_do_not_depend_on_the_labels_or_the_scale_of_the_loss():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = randn(6, 3)
    first = factors_after_one_step(model, x, cross_entropy_to_noise, **EXACT_CE)
    second = factors_after_one_step(model, x, lambda output: 7 * cross_entropy_to_noise(output), **EXACT_CE)
    for name, factors in first.items():
        for key, factor in factors.items():
            assert torch.equal(second[name][key], factor)


def test_the_gradient_is_still_that_of_the_loss():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    other, x, labels = copy.deepcopy(model), randn(6, 3), torch.randint(3, (6,))
    with KFAC(model, **(PLAIN | EXACT_CE)):
        F.cross_entropy(model(x), labels).backward()
    F.cross_entropy(other(x), labels).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_ekfac_moments_are_the_gauss_newton_diagonal_in_the_basis():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = randn(8, 3)
    block = gauss_newton(model, "0", x, mean_square)
    with KFAC(model, **(PLAIN | EXACT_MSE | {"curvature": "ekfac", "inverse_interval": 10})) as kfac:
        for _ in range(2):
            mse_to_noise(model(x)).backward()
            kfac.step()
        saved = kfac.state_dict()["layers"]["0"]
    Q = torch.kron(*(saved["decompositions"][key]["matrix"][0] for key in ("A", "G")))
    moments = (saved["moments"]["value"] / saved["moments"]["weight"])[0]
    assert_close(moments.T.flatten(), (Q.T @ block @ Q).diagonal())


@pytest.mark.parametrize("shape", [(12, 3), (4, 5, 3)])
def test_one_step_solves_a_linear_regression(shape):
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x, target = randn(*shape), randn(*shape[:-1], 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_terms = "batch" if len(shape) == 2 else "token"
    options = {"damping": 0.0, "rescale": "none", "loss_terms": loss_terms}
    with KFAC(model, optimizer, **(EXACT | EXACT_MSE | options)):
        F.mse_loss(model(x), target).backward()
        optimizer.step()
    ones = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1).reshape(-1, 4)
    solution = torch.linalg.lstsq(ones, target.reshape(-1, 2)).solution.T
    assert_close(torch.cat([model[0].weight, model[0].bias[:, None]], dim=1).detach(), solution, tol=1e-8)


def test_one_step_of_natural_gradient_equals_the_dense_gauss_newton_solve():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, target = randn(12, 3), randn(12, 2)
    blocks = {name: gauss_newton(model, name, x, mean_square) for name in ("0", "1")}
    with KFAC(model, **(PLAIN | EXACT_MSE | {"damping": 1e-2})) as kfac:
        F.mse_loss(model(x), target).backward()
        before = {name: ref.gradient_blocks(model.get_submodule(name)).clone() for name in blocks}
        kfac.step()
    for name, block in blocks.items():
        dense = ref.single_precondition(block, before[name][0].T.flatten(), 1e-2)
        after = ref.gradient_blocks(model.get_submodule(name))[0].T.flatten()
        assert_solved(after, dense)


@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
def test_micro_batches_change_nothing_whatever_the_loop_divides_by(accumulate):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, labels = randn(12, 3), torch.randint(3, (12,))
    expected = ref.exact_factors(model, x, ["0", "2"], "cross_entropy", 12, "expand")
    with KFAC(model, **(PLAIN | EXACT_CE | {"accumulate": accumulate, "damping": 1e-2})) as kfac:
        for part in (slice(0, 7), slice(7, 12)):
            n = part.stop - part.start
            scale = {"mean": 1 / 2, "sum": 1, "terms": n / 12}[accumulate]
            (scale * F.cross_entropy(model(x[part]), labels[part])).backward()
        before = ref.gradient_blocks(model[0]).clone()
        kfac.step()
        assert_factors(kfac.factors(), expected)
    assert_solved(ref.gradient_blocks(model[0]), oracle_direction(expected["0"], before, 1e-2))


def test_without_fisher_loss_it_is_refused():
    with pytest.raises(ValueError, match=r'fisher="exact" needs fisher_loss="cross-entropy", "bernoulli" or "mse"'):
        KFAC(nn.Linear(3, 2), fisher="exact", announce=False)


def test_an_output_of_another_shape_is_refused_with_the_shape_that_is_needed():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    with (
        KFAC(model, **(PLAIN | EXACT_CE)),
        pytest.raises(ValueError, match=r"needs a model output of shape \[N, classes\], not \[4, 5, 2\]"),
    ):
        model(randn(4, 5, 3))


def test_masked_positions_send_no_hessian_back():
    """Padding at the end of each sequence; the loss is a mean over the rest."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, labels = randn(3, 5, 3), torch.randint(3, (3, 5))
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    rows = x[mask]
    expected = ref.exact_factors(model, rows, ["0", "2"], "cross_entropy", 10, "expand")
    with KFAC(model, **(PLAIN | EXACT_CE | {"loss_terms": "token"})) as kfac:
        output = model(x)
        kfac.set_terms(10, mask)
        F.cross_entropy(output[mask], labels[mask]).backward()
        kfac.step()
        assert_factors(kfac.factors(), expected)
