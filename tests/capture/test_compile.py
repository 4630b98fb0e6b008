"""torch.compile (R15): the same statistics, no graph breaks, few recompilations, an error when attached too late."""

import shutil

import pytest
import torch
from helpers_capture import (
    assert_factors,
    assert_same,
    attach,
    batch,
    batches,
    gradients,
    mean_loss,
    mlp,
    oracle_factors,
    parameters,
    train,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

# torch's compilers use what torch deprecates
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LAYERS = ["0", "2", "4"]
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def step_once(model, run, kfac, x, y):
    model.zero_grad()
    mean_loss(run(x), y).backward()
    kfac.step()


@pytest.mark.parametrize(
    ("backend", "when", "wrapper"),
    [
        pytest.param(backend, when, wrapper, marks=() if (i + j + k) % 2 == 0 else pytest.mark.slow)
        for i, backend in enumerate(BACKENDS)
        for j, when in enumerate(["before compile", "after compile"])
        for k, wrapper in enumerate(["torch.compile(model)", "model.compile()"])
    ],
)
def test_a_compiled_model_has_the_factors_and_updates_of_the_eager_one(backend, when, wrapper):
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    with attach(model) as kfac:
        step_once(model, model, kfac, x, y)
        eager = gradients(model)
    kfac = attach(model) if when == "before compile" else None
    if wrapper == "torch.compile(model)":
        compiled = torch.compile(model, fullgraph=True, backend=backend)
    else:
        model.compile(fullgraph=True, backend=backend)
        compiled = model
    kfac = kfac or attach(compiled)
    assert set(kfac.factors()) == set(LAYERS)
    step_once(model, compiled, kfac, x, y)
    assert_factors(kfac, expected)
    assert_same(gradients(model), eager, 1e-10)
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_network_with_in_place_activations_equals_the_oracle(backend):
    model = small_conv_net()
    x, y = torch.randn(5, 2, 4, 4).double(), torch.randn(5, 3).double()
    expected = oracle_factors(model, x, y, ["0", "2", "4"])
    kfac = attach(model)
    step_once(model, torch.compile(model, fullgraph=True, backend=backend), kfac, x, y)
    assert_factors(kfac, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_factors_of_the_oracle():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    step_once(model, torch.compile(model, fullgraph=True, backend="inductor"), kfac, x, y)
    assert_factors(kfac, expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


class Broken(Block):
    """A forward that the compiler cannot take in whole: it compiles the pieces, hooks among them."""

    def forward(self, x):
        for layer in self.net:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_graph_breaks_of_its_own_equals_the_oracle(backend):
    model, (x, y) = Broken(), batch(6, 4)
    expected = oracle_factors(model, x, y, ["net.0", "net.2", "net.4"])
    kfac = attach(model)
    step_once(model, torch.compile(model, backend=backend), kfac, x, y)
    assert_factors(kfac, expected)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.unused = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        x = torch.relu_(self.first(x))
        for _ in range(3):
            x = torch.relu_(self.middle(x))
        return self.last(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_of_a_compiled_layer_is_kept(backend):
    """The compiler must not merge or drop the three recordings of one layer."""
    model, (x, y) = Reused(), batch(6, 4)
    expected = oracle_factors(model, x, y, ["first", "middle", "last"])
    kfac = attach(model)
    step_once(model, torch.compile(model, fullgraph=True, backend=backend), kfac, x, y)
    assert_factors(kfac, expected)
    assert kfac.factors()["unused"] == {}


@pytest.mark.parametrize(
    ("backend", "regional"),
    [
        ("eager", True),
        ("aot_eager", False),
        pytest.param("eager", False, marks=pytest.mark.slow),
        pytest.param("aot_eager", True, marks=pytest.mark.slow),
    ],
)
def test_changing_batch_sizes_train_like_eager_without_a_storm_of_recompilations(backend, regional):
    data = batches([6, 5, 4, 3, 2, 7, 8, 9, 6, 5, 11, 12])

    def run(compiled):
        model = nn.Sequential(Block(), nn.Linear(3, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        kfac = attach(model, optimizer, factor_interval=2, inverse_interval=4)
        counter = CompileCounterWithBackend(backend)
        net = model
        if compiled and regional:
            model[0].compile(fullgraph=True, backend=counter)
        elif compiled:
            net = torch.compile(model, fullgraph=True, backend=counter)
        train(net, optimizer, data)
        return parameters(model), kfac.factors(), counter.frame_count

    weights, factors, _ = run(compiled=False)
    compiled_weights, compiled_factors, num_graphs = run(compiled=True)
    assert_same(compiled_weights, weights, 1e-10)
    assert_factors(compiled_factors, factors)
    assert 1 <= num_graphs <= 4  # measuring or not, static and dynamic batch size


def test_steps_that_do_not_measure_run_a_graph_without_capture():
    model, (x, y) = mlp(), batch(6, 4)
    graphs = []

    def spy(graph, inputs):
        graphs.append(graph)
        return graph.forward

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach(model, optimizer, factor_interval=3, inverse_interval=3)
    train(torch.compile(model, fullgraph=True, backend=spy), optimizer, [(x, y)] * 7)
    measuring = ["autograd_function" in str(list(graph.graph.nodes)) for graph in graphs]
    assert measuring == [True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_of_a_compiled_model_are_counted_as_passes(backend):
    data = batches([6, 6])

    def run(compile_it):
        model = mlp()
        kfac = attach(model, accumulate="mean")
        net = torch.compile(model, fullgraph=True, backend=backend) if compile_it else model
        for x, y in data:
            (mean_loss(net(x), y) / 2).backward()
        assert kfac._collector.window.num_passes == 2
        kfac.step()
        return kfac.factors()

    assert_factors(run(compile_it=True), run(compile_it=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_passes_without_a_weight_gradient_do_not_count(backend):
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    net = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        net(2 * x[:4])
    mean_loss(net(2 * x[:4]), y[:4])
    mean_loss(net(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attaching_after_the_first_compiled_run_is_an_error_that_names_the_cure(backend):
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    net = torch.compile(model, fullgraph=True, backend=backend)
    mean_loss(net(x), y).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = attach(model, optimizer)
    mean_loss(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"attach K-FAC before its first call.*torch\._dynamo\.reset\(\)"):
        optimizer.step()
    torch._dynamo.reset()
    optimizer.zero_grad()
    mean_loss(net(x), y).backward()
    optimizer.step()
    assert_factors(kfac, expected)


def test_a_closed_kfac_leaves_a_compiled_model_training_as_without_it():
    data = batches([6, 6, 6])

    def run(attached):
        torch._dynamo.reset()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        net = torch.compile(model, fullgraph=True, backend="aot_eager")
        if attached:
            with attach(model, torch.optim.SGD(model.parameters(), lr=0.0)):
                mean_loss(net(data[0][0]), data[0][1]).backward()
        train(net, optimizer, data)
        return parameters(model)

    assert_same(run(attached=True), run(attached=False), 1e-12)
