"""block_dim with curvature="adaptive" and "adam-eigen": their oracles with bases of which each piece is its own."""

import functools
import math

import pytest
import reference as ref
import test_adam_eigen as adam
import test_adaptive as adaptive
import torch
from helpers_blocks import whole_matrices
from helpers_parity import weights_of
from helpers_ranks import on_threads
from torch.optim import SGD, AdamW

from dkfac import KFAC

WIDE = {"net": "wide"}
"""The network of ``helpers_parity`` of which 8 cuts everything."""


def block_dim(number):
    """Leave out the setting for whole factors."""
    return {} if number is None else {"block_dim": number}


def matrices(kfac, model, number):
    """Return the running factors of all layers, ``[B, D, D]``, with zeros between pieces."""
    found = kfac.factors()
    return {
        layer.name: whole_matrices(model.get_submodule(layer.name), found[layer.name], number) for layer in kfac.layers
    }


class InPieces:
    """Of an oracle: bases whose pieces are decomposed by themselves; the bias that is cut off is turned by G alone."""

    cut_at = None

    def refresh(self, factors):
        for name, found in factors.items():
            if "F" in found:
                super().refresh({name: found})
                continue
            widths = ref.layer_pieces(self.model.get_submodule(name), self.cut_at)
            new = [by_pieces(found[key], widths[key]) for key in ("G", "A")]
            if name in self.bases:
                self.carry(name, new)
            self.bases[name], self.factors[name] = new, [found["G"], found["A"]]


def by_pieces(blocks, widths):
    vectors = torch.zeros_like(blocks)
    for here in ref.piece_slices(widths):
        vectors[:, here, here] = adam.eigenvectors(blocks[:, here, here])
    return vectors


class AdamOracle(InPieces, adam.Oracle):
    pass


class AdaptiveOracle(InPieces, adaptive.Oracle):
    pass


# --- equal to the oracles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [math.inf, 2e-4])
@pytest.mark.parametrize("number", [None, 3, 5])
@pytest.mark.parametrize("case", ["AdamW", "Adam, L2"])
def test_adam_in_pieces_takes_the_steps_written_out(case, number, clip):
    options = {} if clip == math.inf else {"rescale": "kl-clip", "kl_clip": clip}
    oracle = AdamOracle(case, kl_clip=clip)
    oracle.cut_at = number
    model, optimizer, kfac = adam.start(case, **options, **block_dim(number))
    assert [layer.name for layer in kfac.layers] == adam.LAYERS
    for step in range(16):
        adam.backward(model, step)
        optimizer.step()
        adam.backward(oracle.model, step)
        oracle.step(matrices(kfac, model, number) if step % 4 == 0 else None)
        adam.assert_weights(model, oracle.model, 1e-9)
    assert (min(oracle.least) < 1) == (clip < 1)


NETS = [("vision", 4, {"skip": ["8"]}), ("vision", None, {"skip": ["8"]}), ("wide", 8, {}), ("wide", None, {})]
NETS += [("language", 3, {"loss_terms": "token"}), ("language", None, {"loss_terms": "token"})]


@pytest.mark.parametrize(("net", "number", "options"), NETS, ids=str)
@pytest.mark.parametrize("case", ["AdamW", "Adam, L2", "SGD", "SGD, Nesterov, L2", "RMSprop, L2"])
def test_adaptive_steps_in_pieces_are_those_written_out(case, net, number, options):
    run = adaptive.Run(case, net=net, **options, **block_dim(number))
    oracle = AdaptiveOracle(case, names_of(run.kfac), net=net)
    oracle.cut_at = number
    for step in range(14):
        run.train(step, step + 1)
        oracle.backward(step)
        oracle.step(matrices(run.kfac, run.model, number) if step % 4 == 0 else None)
        adam.assert_weights(run.model, oracle.model, 1e-9)
    assert len(set(oracle.c.values())) == len(oracle.c), "each layer has a damping of its own"


def names_of(kfac):
    return [layer.name for layer in kfac.layers]


@pytest.mark.parametrize("case", ["AdamW", "SGD"])
def test_wider_than_everything_it_changes_nothing_and_narrower_it_does(case):
    whole, same, pieces = (
        weights_of(adaptive.Run(case, **WIDE, **block_dim(number)).train(0, 10).model) for number in (None, 1000, 8)
    )
    assert all(map(torch.equal, whole, same))
    assert max(float((p - q).abs().max()) for p, q in zip(whole, pieces, strict=True)) > 1e-3


@pytest.mark.parametrize("case", ["AdamW", "SGD"])
def test_micro_batches_give_the_weights_of_the_whole_batch(case):
    once, thrice = (adaptive.Run(case, accumulate="mean", **WIDE, block_dim=8).train(0, 10, pieces=n) for n in (1, 3))
    adam.assert_weights(thrice.model, once.model, 1e-9)


# --- several ranks -----------------------------------------------------------------------------------------------


@functools.cache
def one_process(case, number):
    return adaptive.job(0, 1, case, WIDE | block_dim(number))[0]


WAYS = [(2, "hybrid-opt", "gradients"), (3, "sharded", "gradients"), (4, "comm-opt", "gradients")]
WAYS += [(2, "layer-wise", "weights"), (4, "sharded", "weights")]


@pytest.mark.parametrize("number", [None, 8, 64])
@pytest.mark.parametrize(("world_size", "strategy", "share"), WAYS)
@pytest.mark.parametrize("case", ["AdamW", "SGD"])
def test_ranks_train_like_one_process(case, world_size, strategy, share, number):
    options = WIDE | {"strategy": strategy, **({"share": share} if share == "weights" else {})} | block_dim(number)
    ranks = on_threads(world_size, adaptive.job, world_size, case, options)
    adam.assert_same_weights([weights for weights, _ in ranks], one_process(case, number))


@pytest.mark.parametrize("case", ["AdamW", "SGD"])
def test_four_ranks_go_on_as_two(case):
    options = WIDE | {"strategy": "sharded", "block_dim": 8}
    saved = on_threads(4, adaptive.job, 4, case, options, 0, 5)[0][1]
    ranks = on_threads(2, adaptive.job, 2, case, options, 5, 10, saved)
    adam.assert_same_weights([weights for weights, _ in ranks], one_process(case, 8))


@pytest.mark.parametrize("number", [None, 8])
@pytest.mark.parametrize(("kind", "rate"), [(SGD, {"lr": 0.05, "momentum": 0.9}), (AdamW, {"lr": 1e-2})])
def test_with_nothing_else_set_training_lowers_the_loss_in_pieces(kind, rate, number):
    """Float32, the intervals and the solver of K-FAC's own choice."""
    model = adaptive.build("wide", torch.float32)
    optimizer = kind(model.parameters(), **rate)
    kfac = KFAC(model, optimizer, announce=False, **block_dim(number))
    assert kfac.settings.curvature == "adaptive"
    losses = []
    for step in range(40):
        x, y = adaptive.batch(step, "wide", torch.float32)
        optimizer.zero_grad()
        loss = adaptive.mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:2]) * 5 / 2, losses
