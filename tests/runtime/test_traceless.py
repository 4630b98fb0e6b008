"""Nothing of K-FAC is left in copies and files of an attached model, and compilers and exporters work with it."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import dkfac
from dkfac.capture.traceless import CaptureHook, hide_hooks

QUIET = {"announce": False, "factor_interval": 1, "inverse_interval": 1, "norm_form": "unit"}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.fixture
def attached():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kfac = dkfac.KFAC(model, optimizer, **QUIET)
    train(model, optimizer, 2)
    return model, optimizer, kfac


def pickled(thing):
    return pickle.dumps(thing)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@pytest.mark.parametrize("write", [pickled, saved])
def test_a_file_of_an_attached_model_is_that_of_a_plain_one(attached, write):
    model, optimizer, kfac = attached
    found = write(model), write(optimizer)
    kfac.close()
    assert len(found[0]) == len(write(model))
    for one in (*found, write(optimizer), write(optimizer.state_dict())):
        assert b"dkfac" not in one
        assert b"nullcontext" not in one


READER = """
import sys
sys.modules["dkfac"] = None  # importing it raises ImportError
import torch
model = torch.load(sys.argv[1], weights_only=False)
calls = []
for module in model.modules():  # ids of hooks are counted anew here and must not meet those of another process
    for _ in range(20):
        module.register_forward_pre_hook(lambda module, args: calls.append(1))
        module.register_forward_hook(lambda module, args, output: calls.append(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(6, 1, 5, 5)).square().mean().backward()
optimizer.step()
print("trained", len(calls))
"""


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, torch.compile], ids=["plain", "dp", "compile"])
def test_a_saved_model_trains_where_dkfac_is_not_installed(attached, wrap, tmp_path):
    model, _, kfac = attached
    with warnings.catch_warnings(action="ignore"):
        wrapped = wrap(model)
        torch.save(wrapped, tmp_path / "model.pt")
    if not hasattr(wrapped, "_orig_mod"):  # compiling takes long
        done = subprocess.run([sys.executable, "-c", READER, tmp_path / "model.pt"], capture_output=True, text=True)
        assert done.stdout.startswith("trained 2"), done.stderr
    assert b"dkfac" not in (tmp_path / "model.pt").read_bytes()
    assert len(kfac.factors()) == 3


def test_a_deep_copy_has_no_hooks_and_keeps_the_users():
    model = make_model()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = dkfac.KFAC(model, optimizer, **QUIET)
    clone = copy.deepcopy(model)
    assert [len(vars(module)["_forward_hooks"]) for module in clone] == [1, 0, 0, 0, 0]
    for module in clone.modules():
        assert not any(vars(module)[name] for name in ("_forward_pre_hooks", "_forward_hooks_with_kwargs"))
    before = kfac.factors()
    train(clone, torch.optim.SGD(clone.parameters(), lr=0.1), 1)
    assert len(calls) == 1
    assert kfac.factors() == before
    assert kfac.metrics()["step"] == 0


class Silent(CaptureHook):
    def __call__(self, *_):
        return None


def test_all_registries_of_hooks_are_left_out():
    module = nn.Linear(2, 2)
    handles = [
        module.register_forward_hook(Silent(), with_kwargs=True, always_call=True),
        module.register_forward_pre_hook(Silent(), with_kwargs=True),
    ]
    handles += hide_hooks([module])
    clone = copy.deepcopy(module)
    assert {name for name, value in vars(clone).items() if "_hooks" in name and value} == set()
    assert len([name for name, value in vars(module).items() if "_hooks" in name and value]) == 5
    for handle in handles:
        handle.remove()
    assert set(vars(module)) == set(vars(nn.Linear(2, 2)))


def test_closing_leaves_the_attributes_that_were_there(attached):
    model, _, kfac = attached
    kfac.close()
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in make_model().modules()]


def test_two_attachments_to_parts_hide_until_the_last_one_is_closed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kfacs = [dkfac.KFAC(model, torch.optim.SGD(part.parameters(), lr=0.1), **QUIET) for part in model]
    kfacs[0].close()
    assert b"dkfac" not in pickle.dumps(model)
    kfacs[1].close()
    assert "__getstate__" not in vars(model)


class WithState(nn.Linear):
    def __getstate__(self):
        return {**self.__dict__, "told": True}


class WithReduce(nn.Linear):
    def __reduce__(self):
        made = (WithReduce, (self.in_features, self.out_features))
        return (*made, dict(self.__dict__))

    def __deepcopy__(self, memo):
        clone = WithReduce(self.in_features, self.out_features)
        clone.__dict__ = copy.deepcopy(dict(self.__dict__), memo)
        return clone


def test_classes_with_their_own_pickling_keep_it():
    with_state, with_reduce = WithState(3, 3), WithReduce(3, 3)
    model = nn.Sequential(with_state, with_reduce)
    dkfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **QUIET)
    for clone in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert clone[0].told
        assert clone(torch.ones(2, 3)).shape == (2, 3)  # where the class copies its hooks itself, they do nothing
        assert b"dkfac" not in pickle.dumps(clone)


def test_a_copy_does_not_keep_the_original_alive(attached):
    model, optimizer, kfac = attached
    clone = copy.deepcopy(model)
    alive = [weakref.ref(thing) for thing in (model[0], kfac)]
    del attached, model, optimizer, kfac
    gc.collect()
    assert "__getstate__" not in vars(clone)
    # The fixture's tuple is still held by pytest; what counts is that the clone has no way back.
    assert not [r for r in gc.get_referrers(*[a() for a in alive if a() is not None]) if r is vars(clone)]


X = torch.ones(6, 1, 5, 5)
TOOLS = {
    "script": lambda model: torch.jit.script(model),
    "trace": lambda model: torch.jit.trace(model, X, check_trace=False),
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "fx": lambda model: torch.fx.symbolic_trace(model),
    "quantize": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore")
def test_compilers_and_exporters_work_while_attached_or_say_what_to_do(attached, tool):
    model, optimizer, kfac = attached
    if tool == "script":
        with pytest.raises(AttributeError, match=r"call kfac.close\(\) or dkfac.detach\(model\) first"):
            torch.jit.script(model)
        assert TOOLS[tool](copy.deepcopy(model))(X).shape == (6, 4)
    else:
        with torch.no_grad():
            found = TOOLS[tool](model)
            assert found(X).shape == (6, 4)
        if tool == "export":
            assert "dkfac" not in str(found.graph)
    train(model, optimizer, 1)
    assert kfac.metrics()["step"] == 3
    kfac.close()
    assert TOOLS[tool](model)(X).shape == (6, 4)


def test_a_trace_with_gradients_is_not_measured(attached):
    """As a logger takes it that draws the model: ``SummaryWriter.add_graph``."""
    model, optimizer, kfac = attached
    model.eval()  # batch norm would count it
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced = torch.jit.trace(model, X, check_trace=False)
    assert "PythonOp" not in str(traced.inlined_graph)
    model.train()
    again = make_model()
    like = torch.optim.AdamW(again.parameters(), lr=0.01)
    dkfac.KFAC(again, like, **QUIET)
    for each, its in ((model, optimizer), (again, like)):
        train(each, its, 2)
    train(again, like, 2)
    assert kfac.metrics()["step"] == 4
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
