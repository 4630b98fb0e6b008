"""The oracle against truths that do not share its code: autograd, Jacobians, Hessians, F.unfold."""

import itertools

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

# torch warns about its own padded copy for "same" with an even kernel; that case is wanted here
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class Conv1D(nn.Module):
    """The layout of transformers' Conv1D: weight ``[in, out]``."""

    def __init__(self, out, inp):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inp, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Twice(nn.Module):
    """One layer called twice, with an in-place nonlinearity on its output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(F.relu_(self.lin(x)))


class Pooled(nn.Module):
    """A deep linear network on ``[N, S, 3]`` that averages its positions before the last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.last(self.first(x).mean(dim=1))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def square_loss(output, target):
    return ((output - target) ** 2).sum()


def assert_close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def vec(grad_OI):
    """Column stacking, the order in which ``kron(A, G)`` acts."""
    return grad_OI.T.reshape(-1)


def recorded_rows(model, name, x, target, loss=square_loss):
    return ref.all_rows(model.get_submodule(name), ref.per_example(model, loss, x, target, [name])[name])


def assert_rows_give_the_gradient(model, name, x):
    model.zero_grad()
    target = torch.randn_like(model(x))
    square_loss(model(x), target).backward()
    module = model.get_submodule(name)
    true = ref.gradient_blocks(module)
    total = torch.zeros_like(true)
    for a_rows, g_rows in itertools.chain(*recorded_rows(model, name, x, target)):
        total += torch.einsum("bso,bsi->boi", g_rows, a_rows)
    assert_close(total, true)
    grads = [p.grad.clone() for p in module.parameters() if p.requires_grad]
    ref.set_gradient_blocks(module, total)
    for p, g in zip([p for p in module.parameters() if p.requires_grad], grads, strict=True):
        assert_close(p.grad, g)


# Rows


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("kind", "args", "settings", "shape"),
    [
        (nn.Conv1d, (3, 4, 4), {"stride": 2, "padding": 2}, (3, 9)),
        (nn.Conv1d, (2, 4, 4), {"padding": "same"}, (2, 7)),
        (nn.Conv2d, (4, 6, (2, 3)), {"padding": (1, 2), "dilation": (1, 2), "groups": 2}, (4, 6, 7)),
        (nn.Conv2d, (4, 6, (2, 3)), {"padding": "same", "dilation": (1, 2), "groups": 2}, (4, 5, 6)),
        (nn.Conv2d, (2, 3, (2, 3)), {"padding": "valid", "stride": (2, 1)}, (2, 5, 6)),
        (nn.Conv2d, (4, 8, 3), {"padding": 1, "groups": 4, "bias": False}, (4, 4, 5)),
        (nn.Conv3d, (2, 2, (2, 1, 3)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}, (2, 3, 2, 4)),
        (nn.Conv3d, (2, 2, 2), {"padding": "same"}, (2, 3, 2, 4)),
    ],
)
def test_convolution_rows_sum_to_autograds_gradient(kind, args, settings, shape, mode):
    model = nn.Sequential(kind(*args, padding_mode=mode, **settings), nn.Tanh()).double()
    assert_rows_give_the_gradient(model, "0", randn(2, *shape))


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Linear(3, 4, bias=False), Conv1D(4, 3)])
def test_linear_rows_sum_to_autograds_gradient(layer, shape):
    assert_rows_give_the_gradient(nn.Sequential(layer.double(), nn.Tanh()), "0", randn(2, *shape))


def test_a_frozen_bias_is_not_folded():
    model = nn.Sequential(nn.Linear(3, 4)).double()
    model[0].bias.requires_grad_(False)
    assert_rows_give_the_gradient(model, "0", randn(2, 3))
    assert recorded_rows(model, "0", randn(1, 3), randn(1, 4))[0][0][0].shape == (1, 1, 3)


def test_embedding_rows_without_padding_sum_to_autograds_gradient():
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=2), nn.Linear(3, 2)).double()
    tokens = torch.tensor([[0, 2, 4, 2], [1, 1, 3, 0]])
    assert_rows_give_the_gradient(model, "0", tokens)
    example_rows = recorded_rows(model, "0", tokens, randn(2, 4, 2))
    assert [calls[0][0].shape[1] for calls in example_rows] == [2, 4]


def test_a_layer_called_twice_gives_two_calls_that_sum_to_autograds_gradient():
    model = nn.Sequential(Twice()).double()
    assert_rows_give_the_gradient(model, "0.lin", randn(3, 3))
    assert [len(calls) for calls in recorded_rows(model, "0.lin", randn(3, 3), randn(3, 3))] == [2, 2, 2]


# Factors


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_vector_makes_the_curvature_the_outer_product_of_the_gradient(sharing):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    x, target = randn(1, 3), randn(1, 4)
    f = ref.factors(recorded_rows(model, "0", x, target), 1, sharing)
    square_loss(model(x), target).backward()
    grad = vec(ref.gradient_blocks(model[0])[0])
    assert_close(torch.kron(f["A"][0], f["G"][0]), torch.outer(grad, grad))


def test_convolution_factors_equal_einsum_on_unfold():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, stride=2, bias=False)).double()
    x, target = randn(3, 3, 5, 6), randn(3, 4, 3, 3)
    example_rows = recorded_rows(model, "0", x, target)
    a = F.unfold(x, 3, padding=1, stride=2).mT
    g = 2 * (model(x) - target).detach().flatten(2).mT
    expand = ref.factors(example_rows, 3, "expand")
    assert_close(expand["A"][0], torch.einsum("nsi,nsj->ij", a, a) / (3 * 9))
    assert_close(expand["G"][0], torch.einsum("nso,nsp->op", g, g) / 3)
    reduce = ref.factors(example_rows, 3, "reduce")
    assert_close(reduce["A"][0], torch.einsum("ni,nj->ij", a.mean(1), a.mean(1)) / 3)
    assert_close(reduce["G"][0], torch.einsum("no,np->op", g.sum(1), g.sum(1)) / 3)


def test_calls_count_as_further_examples_in_a_but_not_in_the_terms_of_g():
    (a, g), (b, h) = [(randn(1, 5, 3), randn(1, 5, 2)) for _ in range(2)]
    f = ref.factors([[(a, g), (b, h)]], 1, "reduce")
    means, sums = torch.cat([a, b]).mean(1), torch.cat([g, h]).sum(1)
    assert_close(f["A"][0], means.T @ means / 2)
    assert_close(f["G"][0], sums.T @ sums)


def gauss_newton(model, name, x, hessian):
    """Sum over all outputs of J' H J for ``[weight, bias]`` of one layer, by torch's own Jacobian."""
    module = model.get_submodule(name)
    parts = [module.weight] if module.bias is None else [module.weight, module.bias[:, None]]
    theta = torch.cat([p.detach() for p in parts], dim=1)

    def output(vector):
        matrix = vector.reshape(theta.T.shape).T
        new = {f"{name}.weight": matrix[:, : module.in_features]}
        if module.bias is not None:
            new[f"{name}.bias"] = matrix[:, -1]
        return functional_call(model, new, (x,))

    jacobian = torch.autograd.functional.jacobian(output, vec(theta)).reshape(-1, hessian.shape[0], theta.numel())
    return sum(j.T @ hessian @ j for j in jacobian)


@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 3)])
def test_exact_factors_of_a_deep_linear_network_are_its_gauss_newton_blocks(shape):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    x = randn(*shape)
    terms = x[..., 0].numel()
    exact = ref.exact_factors(model, x, ["0", "1", "2"], "mse", terms, "expand")
    for name, f in exact.items():
        true = gauss_newton(model, name, x, 2 / 2 * torch.eye(2, dtype=torch.float64)) / terms
        assert_close(torch.kron(f["A"][0], f["G"][0]), true)


def test_reduced_exact_factors_of_a_pooled_linear_network_are_its_gauss_newton_blocks():
    model, x = Pooled().double(), randn(6, 5, 3)
    exact = ref.exact_factors(model, x, ["first", "last"], "mse", 6, "reduce")
    for name, f in exact.items():
        true = gauss_newton(model, name, x, torch.eye(2, dtype=torch.float64)) / 6
        assert_close(torch.kron(f["A"][0], f["G"][0]), true)


def test_exact_factors_of_softmax_regression_on_one_example_are_the_hessian():
    model, x = nn.Sequential(nn.Linear(3, 4, bias=False)).double(), randn(1, 3)
    exact = ref.exact_factors(model, x, ["0"], "cross_entropy", 1, "expand")["0"]

    def loss(vector):
        return F.cross_entropy(x @ vector.reshape(3, 4), torch.tensor([1]))

    hessian = torch.autograd.functional.hessian(loss, vec(model[0].weight.detach()))
    assert_close(torch.kron(exact["A"][0], exact["G"][0]), hessian)


def test_exact_factors_count_a_term_of_many_positions_once():
    """Mean over N and S: with terms=N the curvature of the loss is what it is with terms=N*S."""
    model, x = nn.Sequential(nn.Linear(3, 4)).double(), randn(2, 5, 3)
    batch = ref.exact_factors(model, x, ["0"], "cross_entropy", 2, "expand")["0"]
    token = ref.exact_factors(model, x, ["0"], "cross_entropy", 10, "expand")["0"]
    assert_close(batch["A"], token["A"])
    assert_close(batch["G"], token["G"])


# Norm layers


def norms():
    trained = nn.BatchNorm2d(4)
    evaluated = nn.BatchNorm1d(4).eval()
    evaluated.running_mean, evaluated.running_var = torch.randn(4), torch.rand(4) + 0.5
    return [
        (trained, (5, 4, 2, 3)),
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm3d(2), (3, 2, 2, 1, 3)),
        (evaluated, (5, 4, 3)),
        (nn.LayerNorm(4), (3, 5, 4)),
        (nn.LayerNorm((2, 3)), (3, 5, 2, 3)),
        (nn.LayerNorm(4, bias=False), (3, 4)),
        (nn.GroupNorm(2, 4), (3, 4, 2, 3)),
        (nn.RMSNorm(4), (3, 5, 4)),
        (nn.RMSNorm(4, eps=1e-2), (3, 5, 4)),
    ]


@pytest.mark.parametrize("case", range(10))
def test_normalised_is_the_layer_without_gamma_and_beta_and_gives_their_gradient(case):
    module, shape = norms()[case]
    module.double()
    x = randn(*shape)
    output = module(x)  # gamma = 1, beta = 0
    x_hat = ref.normalised(module, x)
    assert_close(x_hat, ref.norm_rows(module, output))
    g = torch.randn_like(output)
    output.backward(g)
    g_rows = ref.norm_rows(module, g)
    assert_close((x_hat * g_rows).sum((0, 1)).reshape(module.weight.shape), module.weight.grad)
    if getattr(module, "bias", None) is not None:
        assert_close(g_rows.sum((0, 1)).reshape(module.bias.shape), module.bias.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_the_full_norm_factor_is_the_fisher_and_the_others_are_parts_of_it(bias):
    model = nn.Sequential(nn.LayerNorm(3, bias=bias), nn.Tanh()).double()
    x, target = randn(4, 5, 3), randn(4, 5, 3)
    fisher = 0
    for n in range(4):
        loss = square_loss(model(x[n : n + 1]), target[n : n + 1])
        grad = torch.cat(torch.autograd.grad(loss, list(model.parameters())))
        fisher = fisher + torch.outer(grad, grad) / 4
    pairs = [calls[0] for calls in ref.per_example(model, square_loss, x, target, ["0"])["0"]]
    rows = [ref.normalised(model[0], x)[0] for x, _ in pairs], [g[0] for _, g in pairs]
    form = {f: ref.norm_factor(*rows, 4, f, bias) for f in ("full", "unit", "diagonal")}
    assert_close(form["full"], fisher)
    assert_close(form["diagonal"], fisher.diagonal())
    for c in range(3):
        index = torch.arange(c, len(fisher), 3)
        assert_close(form["unit"][c], fisher[index][:, index])
    grad = randn(len(fisher))
    in_place = torch.zeros_like(fisher)
    for c in range(3):
        index = torch.arange(c, len(fisher), 3)
        in_place[index[:, None], index] = form["unit"][c]
    for f, dense in [("full", fisher), ("unit", in_place), ("diagonal", fisher.diagonal().diag())]:
        damped = dense + 0.1 * torch.eye(len(grad), dtype=torch.float64)
        assert_close(ref.norm_precondition(form[f], grad, 0.1, f), torch.linalg.inv(damped) @ grad)
        mean = torch.linalg.eigvalsh(dense).mean().item()
        assert ref.relative_norm_damping(0.1, form[f], f) == pytest.approx(0.1 * mean)


# Preconditioning


def spd(*shape):
    x = randn(*shape, shape[-1] + 2)
    return x @ x.mT


def test_dense_precondition_equals_the_eigen_formula():
    A, G, grad = spd(4), spd(3), randn(3, 4)
    (v_A, Q_A), (v_G, Q_G) = torch.linalg.eigh(A), torch.linalg.eigh(G)
    eigen = Q_G @ ((Q_G.T @ grad @ Q_A) / (torch.outer(v_G, v_A) + 0.1)) @ Q_A.T
    assert_close(ref.dense_precondition(A, G, grad, 0.1), eigen)
    assert_close(ref.ekfac_precondition(torch.outer(v_G, v_A), Q_A, Q_G, grad, 0.1), eigen)


def test_without_damping_null_directions_are_left_out():
    a, grad = randn(4, 2), randn(3, 4)
    A, G = a @ a.T, spd(3)
    v = ref.dense_precondition(A, G, grad, 0)
    assert_close(v, torch.linalg.inv(G) @ grad @ torch.linalg.pinv(A), tol=1e-8)


def test_factored_precondition_solves_its_own_damped_system_and_pi_balances_the_factors():
    A, G, grad = 100 * spd(4), spd(3), randn(3, 4)
    v = ref.factored_precondition(A, G, grad, 0.1)
    pi = ((A.trace() / 4) / (G.trace() / 3)).sqrt()
    eye_A, eye_G = torch.eye(4, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    assert_close((G + 0.1**0.5 / pi * eye_G) @ v @ (A + pi * 0.1**0.5 * eye_A), grad)
    # only the product of the factors matters: a constant may move from one to the other
    assert_close(ref.factored_precondition(A / 7, 7 * G, grad, 0.1), v)
    without_G = ref.factored_precondition(A, torch.zeros_like(G), grad, 0.1)
    assert_close(without_G @ (A + 0.1**0.5 * eye_A), grad / 0.1**0.5)


def test_relative_damping_is_a_fraction_of_the_mean_eigenvalue():
    A, G = spd(2, 4), spd(2, 3)
    dense = torch.block_diag(*(torch.kron(a, g) for a, g in zip(A, G, strict=True)))
    mean = torch.linalg.eigvalsh(dense).mean().item()
    assert ref.relative_damping(0.3, A, G) == pytest.approx(0.3 * mean)


def test_ekfac_moments_are_the_fishers_diagonal_in_the_basis_and_no_worse_than_kfac():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    x, target = randn(6, 5, 3), randn(6, 5, 4)
    example_rows = recorded_rows(model, "0", x, target)
    f = ref.factors(example_rows, 6, "expand")
    Q_A, Q_G = (torch.linalg.eigh(f[key]).eigenvectors for key in ("A", "G"))
    fisher = 0
    for n in range(6):
        model.zero_grad()
        square_loss(model(x[n : n + 1]), target[n : n + 1]).backward()
        grad = vec(ref.gradient_blocks(model[0])[0])
        fisher = fisher + torch.outer(grad, grad) / 6
    Q = torch.kron(Q_A[0], Q_G[0])
    moments = ref.ekfac_moments(example_rows, Q_A, Q_G, 6)
    assert_close(vec(moments[0]), (Q.T @ fisher @ Q).diagonal())
    error = (fisher - Q @ vec(moments[0]).diag() @ Q.T).norm()
    assert error < (fisher - torch.kron(f["A"][0], f["G"][0])).norm()


def test_ekfac_rotation_is_exact_if_the_old_basis_diagonalises_the_curvature():
    old, new = (tuple(torch.linalg.qr(randn(1, n, n)).Q for n in (4, 3)) for _ in range(2))
    moments = randn(1, 3, 4) ** 2
    Q_old, Q_new = (torch.kron(q[0][0], q[1][0]) for q in (old, new))
    dense = Q_old @ vec(moments[0]).diag() @ Q_old.T
    rotated = ref.ekfac_rotate(moments, old, new)
    assert_close(vec(rotated[0]), (Q_new.T @ dense @ Q_new).diagonal())
    assert_close(ref.ekfac_rotate(moments, old, old), moments)


# Pieces


@pytest.mark.parametrize(
    ("units", "unit", "block_dim", "widths"),
    [
        (64, 9, 256, [144] * 4),  # 28 channels would fit; 3 is no divisor of 64
        (128, 9, 256, [144] * 8),
        (1000, 1, 256, [250] * 4),
        (13, 1, 8, [7, 6]),
        (17, 1, 8, [6, 6, 5]),
        (1, 49, 8, [7] * 7),
        (3, 49, 8, [7] * 21),
        (2, 49, 64, [49, 49]),
        (16, 1, 8, [8, 8]),
        (18, 1, 8, [6, 6, 6]),
        (10, 1, 4, [2] * 5),  # 3 is no divisor of 10, 5 is
        (7, 1, 2, [1] * 7),  # likewise
        (7, 9, 27, [27, 27, 9]),
        (7, 9, 35, [27, 27, 9]),
        (8, 1, 8, [8]),
        (3, 1, 8, [3]),
        (4, 1, 1, [1] * 4),
    ],
)
def test_a_factor_is_cut_as_the_note_says(units, unit, block_dim, widths):
    assert ref.piece_widths(units, unit, block_dim) == widths


def test_pieces_cover_the_factor_fit_and_are_fewer_than_twice_the_least_number():
    for units, unit, block_dim in itertools.product(range(1, 70), (1, 2, 9), range(1, 40)):
        widths = ref.piece_widths(units, unit, block_dim)
        assert sum(widths) == units * unit
        assert 0 < min(widths) <= max(widths) <= block_dim
        assert set(widths[:-1]) <= {widths[0]}
        assert widths[-1] <= widths[0]
        whole = unit if unit <= block_dim else 1
        assert all(width % whole == 0 for width in widths)
        least = -(-units * unit // (block_dim // whole * whole))
        assert least <= len(widths) < 2 * least
        if widths[-1] < widths[0]:
            assert len(widths) == least
            assert all((units * unit // whole) % number for number in range(least, 2 * least))


@pytest.mark.parametrize(
    ("module", "A", "G"),
    [
        (nn.Linear(20, 17), [5] * 4 + [1], [6, 6, 5]),
        (nn.Linear(20, 17, bias=False), [5] * 4, [6, 6, 5]),
        (nn.Linear(7, 8), [8], [8]),  # the bias stays folded in
        (nn.Linear(8, 9), [8, 1], [3] * 3),  # and here it would make A wider than 8
        (nn.Conv2d(2, 3, 2), [8, 1], [3]),
        (nn.Conv2d(4, 9, 2, groups=1, bias=False), [8, 8], [3] * 3),
        (nn.Conv2d(4, 22, 2, groups=2), [8, 1], [6, 5]),
        (nn.Conv2d(1, 3, 3), [3, 3, 3, 1], [3]),
        (Conv1D(9, 16), [8, 8, 1], [3] * 3),
        (nn.Embedding(20, 16), [20], [8, 8]),
    ],
    ids=str,
)
def test_layers_are_cut_by_channels_groups_and_biases(module, A, G):
    whole = {"A": [sum(A)], "G": [sum(G)]}
    assert ref.layer_pieces(module, 8) == {"A": A, "G": G}
    assert ref.layer_pieces(module, None) == ref.layer_pieces(module, 1000) == whole


@pytest.mark.parametrize("bias", [True, False])
def test_factors_in_pieces_are_those_of_parts_of_the_layer(bias):
    """Each tile is a layer of its own: fewer inputs, fewer outputs, or the bias alone."""
    model, x, target = nn.Sequential(nn.Linear(12, 10, bias=bias)).double(), randn(9, 12), randn(9, 10)
    whole = ref.factors(recorded_rows(model, "0", x, target), 9, "expand")
    f = ref.cut_factors(model[0], whole, 5)
    grad, g = randn(10, 12 + bias), 2 * (model(x) - target).detach()
    found = ref.dense_precondition(f["A"][0], f["G"][0], grad, 0.1)
    tiles = torch.zeros_like(found)
    columns = [slice(0, 4), slice(4, 8), slice(8, 12)] + [slice(12, 13)] * bias
    ones = torch.cat([x, torch.ones(9, bias)], dim=1)
    for i, j in itertools.product((slice(0, 5), slice(5, 10)), columns):
        A, G = ones[:, j].T @ ones[:, j] / 9, g[:, i].T @ g[:, i] / 9
        tiles[i, j] = ref.dense_precondition(A, G, grad[i, j], 0.1)
    assert_close(found, tiles)
    assert not torch.allclose(found, ref.dense_precondition(whole["A"][0], whole["G"][0], grad, 0.1), rtol=0.1)


def test_pieces_are_decomposed_by_themselves():
    factor = ref.keep_pieces(spd(2, 7), [3, 3, 1])
    Q = ref.eigenvectors(factor, [3, 3, 1])
    assert_close(Q, ref.keep_pieces(Q, [3, 3, 1]), tol=0)
    assert_close(Q.mT @ Q, torch.eye(7, dtype=torch.float64).expand(2, 7, 7))
    turned = Q.mT @ factor @ Q
    assert_close(turned, torch.diag_embed(turned.diagonal(dim1=1, dim2=2)))
    assert_close(Q[:, 6, 6].abs(), torch.ones(2, dtype=torch.float64))


def test_an_improved_basis_is_one_step_of_subspace_iteration():
    factor, widths = ref.keep_pieces(spd(1, 7), [4, 3]), [4, 3]
    Q, used = ref.improved(factor, widths, None)
    assert_close(used, factor)
    assert_close(ref.improved(factor, widths, Q)[1], factor)
    other = ref.keep_pieces(factor + 0.3 * spd(1, 7), widths)
    Q, used = ref.improved(other, widths, Q)
    assert_close(used.diagonal(dim1=1, dim2=2).sum(), other.diagonal(dim1=1, dim2=2).sum())
    assert not torch.allclose(used, other, rtol=1e-3)
    for _ in range(300):
        Q, used = ref.improved(other, widths, Q)
    assert_close(used, other, tol=1e-6)


# Step control


def test_rescaling_keeps_lengths_and_zero_stays_zero():
    grad = {"a": randn(2, 3), "b": randn(4)}
    v = {"a": 7 * randn(2, 3), "b": torch.zeros(4, dtype=torch.float64)}
    each = ref.norm_rescale(v, grad)
    assert_close(each["a"].norm(), grad["a"].norm())
    assert_close(F.cosine_similarity(each["a"].flatten(), v["a"].flatten(), dim=0).item(), 1.0)
    assert each["b"].eq(0).all()
    both = ref.norm_global_rescale(v, grad)
    assert_close(both["a"].norm(), (grad["a"].norm() ** 2 + grad["b"].norm() ** 2).sqrt())


def test_the_clipped_update_has_the_kl_asked_for_and_small_ones_are_untouched():
    grad = {"a": randn(2, 3), "b": randn(4)}
    v = {name: 5 * g for name, g in grad.items()}
    lr = {"a": 0.1, "b": 0.3}
    clipped = ref.kl_clip(v, grad, lr, 1e-3)
    # v = F^-1 grad with F = 1/5, so the update's squared length in F is sum lr^2 v'Fv
    assert sum((lr[k] ** 2 * (c**2).sum() / 5).item() for k, c in clipped.items()) == pytest.approx(1e-3)
    assert torch.equal(ref.kl_clip(v, grad, 1e-6, 1e-3)["a"], v["a"])
    nothing = {"a": torch.zeros(2)}
    assert torch.equal(ref.kl_clip(nothing, nothing, 0.1, 1e-3)["a"], nothing["a"])


# Training


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def make_batches(steps=4):
    return [(randn(8, 3), randn(8, 2)) for _ in range(steps)]


def test_exact_curvature_solves_linear_regression_in_one_step():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x, target = randn(8, 3), randn(8, 2)
    f = ref.exact_factors(model, x, ["0"], "mse", 8, "expand")["0"]
    F.mse_loss(model(x), target).backward()
    grad = ref.gradient_blocks(model[0])[0]
    v = ref.dense_precondition(f["A"][0], f["G"][0], grad, 0)
    ones = torch.cat([x, torch.ones(8, 1)], dim=1)
    solution = torch.linalg.lstsq(ones, target).solution.T
    assert_close(torch.cat([model[0].weight, model[0].bias[:, None]], dim=1).detach() - v, solution)


@pytest.mark.parametrize("layers", [[], ["0", "1", "3"]])
def test_without_layers_or_with_endless_damping_training_is_sgd(layers):
    settings = ref.ReferenceSettings(damping=1e12, lr=0.1, momentum=0.9)
    oracle = ref.ReferenceKFAC(mlp, layers, square_loss, settings)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = make_batches()
    losses = oracle.run(batches)
    for (x, target), loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        mean = square_loss(model(x), target) / 8
        mean.backward()
        optimizer.step()
        assert loss == pytest.approx(mean.item(), rel=1e-6)
    for p, q in zip(oracle.model.parameters(), model.parameters(), strict=True):
        assert_close(p, q, tol=1e-6)


def test_factors_are_weighted_averages_and_refreshed_at_their_intervals():
    settings = ref.ReferenceSettings(factor_decay=0.5, factor_interval=2, inverse_interval=4, lr=0.05)
    oracle = ref.ReferenceKFAC(mlp, ["0"], square_loss, settings)
    batches = make_batches(5)
    seen = []
    for x, target in batches:
        ones = torch.cat([x, torch.ones(8, 1)], dim=1)
        seen.append(ones.T @ ones / 8)
        oracle.step(x, target)
        if len(seen) == 4:
            assert_close(oracle.used["0"]["A"][0], seen[0])
            assert_close(oracle.factor("0", "A")[0], (0.5 * seen[0] + seen[2]) / 1.5)
    assert_close(oracle.used["0"]["A"][0], (0.25 * seen[0] + 0.5 * seen[2] + seen[4]) / 1.75)


CHANGES = [{}, {"solver": "cholesky"}, {"solver": "warm-eigen"}, {"curvature": "ekfac"}, {"damping_mode": "relative"}]
CHANGES += [change | {"block_dim": 2} for change in CHANGES]


@pytest.mark.parametrize("rescale", ["none", "norm", "norm-global", "kl-clip"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_setting_lowers_the_loss_on_a_fixed_batch(rescale, change):
    settings = ref.ReferenceSettings(damping=1.0, lr=0.05, rescale=rescale, inverse_interval=2, **change)
    oracle = ref.ReferenceKFAC(mlp, ["0", "1", "3"], square_loss, settings)
    losses = oracle.run(make_batches(1) * 5)
    assert losses[-1] < losses[0]
    moments = oracle.running["0"].get("moments")
    assert (moments is not None) == (change.get("curvature") == "ekfac")
    if moments is not None:  # none at step 0, then four of them
        assert moments[1] == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3)


def test_ekfac_measures_in_the_basis_in_use_and_then_rotates():
    settings = ref.ReferenceSettings(curvature="ekfac", lr=0.0)
    oracle = ref.ReferenceKFAC(mlp, ["0"], square_loss, settings)
    first, (x, target) = make_batches(2)
    oracle.step(*first)
    old = oracle.basis["0"]
    assert "moments" not in oracle.running["0"]
    oracle.step(x, target)
    measured = ref.ekfac_moments(recorded_rows(oracle.model, "0", x, target), *old, 8)
    assert not torch.allclose(old[0].abs(), oracle.basis["0"][0].abs())
    assert_close(oracle.factor("0", "moments"), ref.ekfac_rotate(measured, old, oracle.basis["0"]))


def test_token_terms_divide_the_loss_and_g_by_positions():
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 5))

    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    tokens = torch.randint(5, (4, 6))
    settings = ref.ReferenceSettings(loss_terms="token", lr=0.0)
    oracle = ref.ReferenceKFAC(model, ["0", "1"], loss, settings)
    value = oracle.step(tokens, tokens.roll(1, 1))
    output = oracle.model(tokens).flatten(0, 1)
    labels = tokens.roll(1, 1).flatten()
    assert value == pytest.approx(F.cross_entropy(output, labels).item())
    g = (output.softmax(-1) - F.one_hot(labels, 5)).detach()
    assert_close(oracle.used["1"]["G"][0], g.T @ g / 24)
    counts = torch.bincount(tokens[tokens != 0], minlength=5)
    assert_close(oracle.used["0"]["A"][0].diagonal(), counts.double() / counts.sum())
