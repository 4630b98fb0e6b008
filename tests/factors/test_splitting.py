"""R13, MATH.md §1: cutting a batch into micro-batches changes nothing, for each way a loop combines their losses."""

import copy
import itertools
import warnings

import pytest
import reference as ref
import torch
from helpers_exact import (
    PLAIN,
    assert_close,
    assert_factors,
    assert_solved,
    oracle_direction,
    oracle_factors,
    randn,
    square_loss,
    token_loss,
    tokens,
)
from torch import nn

from dkfac import KFAC

SPLITS = [(12,), (6, 6), (7, 5), (4, 4, 4), (1, 4, 2, 3, 2)]
N, S, DAMPING = 12, 4, 1e-2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def vectors():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, randn(N, 3), randn(N, 2), square_loss


def images():
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2)).double()
    return model, randn(N, 2, 3, 3), randn(N, 2), square_loss


def sequences():
    model = nn.Sequential(nn.Embedding(7, 3), nn.RMSNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)).double()
    return model, tokens(N, S), tokens(N, S), token_loss


def slices(split):
    ends = list(itertools.accumulate(split))
    return [slice(end - n, end) for end, n in zip(ends, split, strict=True)]


def coefficient(accumulate, terms, split_terms):
    """What a loop multiplies the sum over a micro-batch's terms by."""
    return {"mean": 1 / (terms * len(split_terms)), "sum": 1 / terms, "terms": 1 / sum(split_terms)}[accumulate]


def accumulate_gradients(model, x, target, loss, split, accumulate, per_example, before_backward=None):
    """Run the loop that ``accumulate`` describes; a mean over ``n * per_example`` terms for n examples."""
    split_terms = [n * per_example for n in split]
    model.zero_grad()
    for part, terms in zip(slices(split), split_terms, strict=True):
        total = loss(model(x[part]), target[part])
        if before_backward is not None:
            before_backward(part)
        (total * coefficient(accumulate, terms, split_terms)).backward()


def gradients(kfac):
    return {layer.name: ref.gradient_blocks(layer.module).clone() for layer in kfac.layers}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("problem", "loss_terms"), [(vectors, "batch"), (images, "batch"), (sequences, "batch"), (sequences, "token")]
)
def test_micro_batches_equal_the_whole_batch(problem, loss_terms, sharing, accumulate, split):
    model, x, target, loss = problem()
    per_example = S if loss_terms == "token" else 1
    options = {"weight_sharing": sharing, "loss_terms": loss_terms, "accumulate": accumulate, "damping": DAMPING}
    whole = copy.deepcopy(model)
    with KFAC(whole, **(PLAIN | options)) as kfac:
        names = [layer.name for layer in kfac.layers]
        accumulate_gradients(whole, x, target, loss, (N,), accumulate, per_example)
        kfac.step()
        at_once = gradients(kfac)
    expected = oracle_factors(model, x, target, names, terms=N * per_example, sharing=sharing, loss=loss)
    with KFAC(model, **(PLAIN | options)) as kfac:
        accumulate_gradients(model, x, target, loss, split, accumulate, per_example)
        raw = gradients(kfac)
        kfac.step()
        assert_factors(kfac.factors(), expected)
        for name, after in gradients(kfac).items():
            assert_solved(after, oracle_direction(expected[name], raw[name], DAMPING))
            if accumulate == "terms" or len(set(split)) == 1:  # else the loop's loss is another one
                times = len(split) if accumulate == "sum" else 1
                assert_close(after, times * at_once[name])


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
def test_micro_batches_have_the_ekfac_moments_of_the_whole_batch(accumulate, split):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, target = randn(N, S, 3), randn(N, S, 2)
    recorded = ref.per_example(model, square_loss, x, target, ["0"])["0"]
    options = {"curvature": "ekfac", "inverse_interval": 10, "accumulate": accumulate}
    with KFAC(model, **(PLAIN | options)) as kfac:
        for _ in range(2):
            accumulate_gradients(model, x, target, square_loss, split, accumulate, 1)
            kfac.step()
        saved = kfac.state_dict()["layers"]["0"]
    Q_A, Q_G = (saved["decompositions"][key]["matrix"] for key in ("A", "G"))
    moments = ref.ekfac_moments(ref.all_rows(model[0], recorded), Q_A, Q_G, N)
    assert_close(saved["moments"]["value"] / saved["moments"]["weight"], moments)


# Padding


def padded():
    """Return ``(model, tokens, labels, mask)``; sequences of 1 to S tokens, anything behind them."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)).double()
    mask = torch.arange(S) < torch.randint(1, S + 1, (N, 1))
    return model, tokens(N, S), tokens(N, S), mask


def oracle_of_padded(model, x, target, mask, sharing):
    """The factors of sequences cut to their lengths; layers act on positions one by one, so cutting is exact."""
    names = ["0", "1", "2", "4"]
    recorded = {name: [] for name in names}
    for n in range(N):
        cut = ref.per_example(model, token_loss, x[n : n + 1, mask[n]], target[n : n + 1, mask[n]], names)
        for name, examples in cut.items():
            recorded[name] += examples
    terms = mask.sum().item()
    result = {}
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, nn.LayerNorm):
            calls = [calls[0] for calls in recorded[name]]
            x_hat = [ref.normalised(module, a, 1)[0] for a, _ in calls]
            g = [ref.norm_rows(module, g, 1)[0] for _, g in calls]
            result[name] = {"F": ref.norm_factor(x_hat, g, terms, "unit", True)}
        else:
            result[name] = ref.factors(ref.all_rows(module, recorded[name]), terms, sharing)
    result["0"]["A"] = torch.diag_embed(result["0"]["A"].diagonal(dim1=1, dim2=2))
    return result


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("on_device", [False, True])
def test_set_terms_leaves_padding_out_in_every_split(on_device, sharing, accumulate, split):
    model, x, target, mask = padded()
    expected = oracle_of_padded(model, x, target, mask, sharing)
    split_terms = [mask[part].sum().item() for part in slices(split)]
    options = {"weight_sharing": sharing, "loss_terms": "token", "accumulate": accumulate, "damping": DAMPING}
    with KFAC(model, **(PLAIN | options)) as kfac:
        for part, terms in zip(slices(split), split_terms, strict=True):
            output = model(x[part])
            kfac.set_terms(mask[part].sum() if on_device else terms, mask[part])
            total = token_loss(output[mask[part]], target[part][mask[part]])
            (total * coefficient(accumulate, terms, split_terms)).backward()
        raw = gradients(kfac)
        kfac.step()
        assert_factors(kfac.factors(), expected)
        for name, after in gradients(kfac).items():
            assert_solved(after, oracle_direction(expected[name], raw[name], DAMPING))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_mask_has_the_layout_of_the_models_input(sharing):
    """Sequence-first: input, labels and mask are all ``[S, N]``."""
    model, x, target, mask = padded()
    expected = oracle_of_padded(model, x, target, mask, sharing)
    options = {"weight_sharing": sharing, "loss_terms": "token", "batch_dim": 1}
    with KFAC(model, **(PLAIN | options)) as kfac:
        output = model(x.T)
        kfac.set_terms(mask.sum().item(), mask.T)
        (token_loss(output[mask.T], target.T[mask.T]) / mask.sum()).backward()
        kfac.step()
        assert_factors(kfac.factors(), expected)


def test_set_terms_holds_for_one_backward_pass():
    """The second micro-batch has no padding and needs no call; a forward without a backward uses nothing up."""
    model, x, target, mask = padded()
    mask[6:] = True
    expected = oracle_of_padded(model, x, target, mask, "expand")
    terms = mask.sum().item()
    with KFAC(model, **(PLAIN | {"loss_terms": "token", "accumulate": "terms"})) as kfac:
        kfac.set_terms(mask[:6].sum().item(), mask[:6])
        model(x[6:])
        (token_loss(model(x[:6])[mask[:6]], target[:6][mask[:6]]) / terms).backward()
        (token_loss(model(x[6:]), target[6:]) / terms).backward()
        kfac.step()
        assert_factors(kfac.factors(), expected)


# Unset


def test_several_backward_passes_with_accumulate_unset_warn_once_and_are_taken_as_mean():
    model, x, target, loss = vectors()
    expected = oracle_factors(model, x, target, ["0", "1", "3"], loss=loss)
    with KFAC(model, **PLAIN) as kfac, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            accumulate_gradients(model, x, target, loss, (7, 5), "mean", 1)
            kfac.step()
            assert_factors(kfac.factors(), expected)
    assert len(caught) == 1
    assert "accumulate" in str(caught[0].message)
    assert "mean" in str(caught[0].message)


@pytest.mark.parametrize(("accumulate", "split"), [("mean", (6, 6)), (None, (12,))])
def test_nothing_is_said_where_nothing_is_assumed(accumulate, split):
    model, x, target, loss = vectors()
    with KFAC(model, **(PLAIN | {"accumulate": accumulate})) as kfac, warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate_gradients(model, x, target, loss, split, "mean", 1)
        kfac.step()
