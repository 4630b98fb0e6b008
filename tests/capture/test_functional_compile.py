"""Weights that functions apply, in compiled code: the mode and the projections are part of the graph."""

from functools import partial

import pytest
import torch
from helpers_capture import assert_factors, assert_same, attach, mean_loss, parameters
from helpers_functional import MODELS, WHOLE, make, oracle_factors
from models.vision import Swin, ViT
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", MODELS)
def test_fullgraph_compiled_code_captures_what_the_oracle_computes(kind):
    model, inputs, target = make(kind)
    expected = oracle_factors(model, inputs, target)
    kfac = attach(model, **WHOLE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mean_loss(compiled(*inputs), target).backward()
    kfac.step()
    assert_factors(kfac, expected)


@pytest.mark.parametrize("kind", [ViT, pytest.param(Swin, marks=pytest.mark.slow)])
def test_compiled_blocks_train_as_eager_ones_over_measured_and_other_steps_and_other_batch_sizes(kind):
    found = []
    for is_compiled in (False, True):
        model, (x,), target = make(kind, size=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kfac = attach(model, optimizer, factor_interval=2, inverse_interval=2, **WHOLE)
        for block in (model.layers if kind is ViT else model.features) if is_compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        for size in (6, 6, 4, 4, 5, 6) if kind is ViT else (6,) * 6:
            optimizer.zero_grad()
            mean_loss(model(x[:size]), target[:size]).backward()
            optimizer.step()
        found.append((kfac.factors(), parameters(model)))
    assert_factors(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1])


def test_a_compiled_model_has_one_graph_for_measured_steps_and_one_for_the_others():
    model, (x,), target = make(ViT)
    kfac, counter = attach(model, factor_interval=2, inverse_interval=2), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(6):
        model.zero_grad()
        mean_loss(compiled(x), target).backward()
        kfac.step()
    assert counter.frame_count == 2


@pytest.mark.parametrize("remedy", [{"fullgraph": False}, {"skip": ["*.in_proj", "*.out_proj"]}, None])
def test_a_checkpoint_inside_a_full_graph_has_the_remedies_that_the_docs_name(remedy):
    model, (x,), target = make(ViT)
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    remedy = remedy or {}
    expected = oracle_factors(model, (x,), target) if "fullgraph" in remedy else None
    kfac = attach(model, skip=remedy.get("skip", []), **WHOLE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=remedy.get("fullgraph", True))
    if not remedy:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)Unsafe side effect.*checkpoint.*self_attention"):
            compiled(x)
        return
    mean_loss(compiled(x), target).backward()
    kfac.step()
    assert all(kfac.factors().values())
    if expected is not None:
        assert_factors(kfac, expected)
