"""Private names of torch are used through one module, which names those that a version lacks."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dkfac
from dkfac.ops import torch_private

PACKAGE = Path(dkfac.__file__).parent
HOME = PACKAGE / "ops" / "torch_private.py"
ELSEWHERE = {
    "torch._dynamo",  # named in a message
    "torch.distributed.algorithms.join: _JoinConfig",  # part of Join's protocol
    "nn.modules.conv._ConvNd",
    "nn.modules.batchnorm._BatchNorm",
    "nn.modules.batchnorm._NormBase",
}
"""Besides: base classes, which have had their names since torch 1."""
ATTRIBUTES = {
    torch.amp.GradScaler("cpu"): ("_get_scale_async", "_per_optimizer_states"),
    torch.nn.Linear(2, 2): ("_parameters", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks"),
    torch.nn.parallel.DistributedDataParallel: ("_active_ddp_module",),
    torch.ones(1): ("_version",),
}
"""Private attributes of instances that are read where the instance is at hand."""


def chain(node):
    """``a.b.c`` as a string; None if it does not begin with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def private_uses(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            found |= {f"{node.module}: {part}" for part in parts if part.startswith("_")}
        path = chain(node) if isinstance(node, ast.Attribute) else None
        first, *rest = (path or "").split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in rest)
        if first in ("torch", "nn", "dist", "distributed_c10d") and private:
            found.add(path)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_used_through_one_module(path):
    if path != HOME:
        assert private_uses(path.read_text()) <= ELSEWHERE


def test_private_uses_are_found():
    text = "torch._C._x()\nfrom torch.a import _b\nfrom torch._c import d\ntorch.nn.Linear\nx._own\nnn.a._b\n"
    assert private_uses(text) == {"torch._C", "torch._C._x", "torch.a: _b", "torch._c: _c", "nn.a._b"}


def test_this_torch_has_them_all():
    assert torch_private.MISSING == []


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: type(owner).__name__)
def test_instances_have_the_private_attributes_that_are_read(owner):
    assert [name for name in ATTRIBUTES[owner] if not hasattr(owner, name)] == []


def test_a_torch_that_lacks_one_is_refused_by_its_name():
    code = "import torch\ndel torch._foreach_norm\nimport dkfac.kfac"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no torch._foreach_norm, which dkfac uses; dkfac was tried with torch" in done.stderr


def test_without_a_view_of_hooks_for_saved_tensors_the_factors_are_the_same(monkeypatch):
    """As with torch before 2.8."""
    hooks = importlib.import_module("dkfac.capture.hooks")
    found = []
    for old in (False, True):
        if old:
            monkeypatch.setattr(hooks, "top_saved_tensors_hooks", lambda _: ())
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = dkfac.KFAC(model, optimizer, announce=False)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4).double()).square().mean().backward()
            optimizer.step()
        found.append(kfac.factors())
    for name, factors in found[0].items():
        for key, factor in factors.items():
            assert torch.allclose(factor, found[1][name][key], rtol=1e-12, atol=0)


def test_the_range_that_is_promised_is_the_one_that_was_tried():
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"torch>={torch_private.TRIED[0]}"' in project
    oldest, here, newest = (
        tuple(map(int, version.split(".")[:2]))
        for version in (torch_private.TRIED[0], torch.__version__, torch_private.TRIED[1])
    )
    assert oldest <= here <= newest
    assert f"{torch_private.TRIED[1]}.0" in project


def test_the_smoke_test_passes_with_this_torch():
    command = [sys.executable, PACKAGE.parent / "tests" / "smoke.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(PACKAGE.parent)})
    assert done.returncode == 0, done.stdout + done.stderr
