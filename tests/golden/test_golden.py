"""Runs come to the values that were committed, and K-FAC gives torch no more operations than it did.

Values hold for any CPU: where kernels for another one come to other values after all steps, those after fewer steps are
committed (``"after"``), and none where they part at once. Two trees are compared bit by bit by ``golden_run.py``.
"""

import dataclasses
import json
import typing
from typing import Literal

import golden_cases
import golden_operations
import golden_run
import pytest

import dkfac

TOLERANCE = 1e-12
QUICK_FOUR = ("adaptive-adam", "strategy-sharded", "share-weights", "wire-rows", "join", "overlap", "resume-lag")
QUICK_GRAPHS = ("adaptive-sgd", "adam-eigen-clip", "kfac-cholesky", "spread", "resume-adaptive")
QUICK = {"four": QUICK_FOUR, "graphs": QUICK_GRAPHS}


def is_quick(name, way):
    return way == "one" or name in QUICK[way]


RUNS = [
    pytest.param(name, way, marks=() if is_quick(name, way) else pytest.mark.slow, id=f"{name}-{way}")
    for name, way in golden_cases.pairs()
]
VALUES = json.loads(golden_run.VALUES.read_text()) if golden_run.VALUES.exists() else {}
OPERATIONS = json.loads(golden_operations.OPERATIONS.read_text()) if golden_operations.OPERATIONS.exists() else {}


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_a_run_comes_to_the_committed_values(name, way):
    committed = VALUES[f"{name} {way}"]
    result = golden_cases.run(name, way)
    if not committed["after"]:
        return  # it ran; its bits are compared by golden_run.py
    found = golden_run.summaries(result, committed["after"])
    assert found.keys() == committed["values"].keys()
    for path, pair in found.items():
        assert golden_run.distance({path: committed["values"][path]}, {path: pair}) <= TOLERANCE, path


def test_every_setting_is_used_in_another_value_than_its_default():
    assert any("graphs" in case.ways for case in golden_cases.CASES.values()), "which sets cuda_graph"
    fields = [*dataclasses.fields(dkfac.Settings), *dataclasses.fields(dkfac.Settings().experimental)]
    for field in (field for field in fields if field.name != "experimental"):
        values = [c.options[field.name] for c in golden_cases.CASES.values() if field.name in c.options]
        assert field.name == "cuda_graph" or any(value != field.default for value in values), field.name


def test_every_choice_of_a_setting_is_used():
    """But for the stream of ``inverse_backend``, which a GPU has, and what "auto" stands for."""
    kinds = (dkfac.Settings, type(dkfac.Settings().experimental))
    for kind, name, hint in ((k, *item) for k in kinds for item in typing.get_type_hints(k).items()):
        if name in ("inverse_backend", "flattened"):
            continue
        parts = (hint, *typing.get_args(hint))
        choices = {c for part in parts if typing.get_origin(part) is Literal for c in typing.get_args(part)}
        default = kind.__dataclass_fields__[name].default
        used = {c.options.get(name, default) for c in golden_cases.CASES.values()}
        assert choices <= used | {"auto"}, name


def test_a_change_is_seen():
    one = golden_cases.run("kfac-eigen", "one")
    assert golden_run.differences(one, golden_cases.run("kfac-eigen", "one")) == {}
    other = dict(one) | {"losses": one["losses"].nextafter(one["losses"] + 1)}
    assert list(golden_run.differences(one, other)) == ["losses"]


@pytest.mark.parametrize(
    ("model", "settings", "ranks"),
    [
        pytest.param(*found, marks=pytest.mark.slow if found[1] == "default" and found[2] > 1 else ())
        for found in golden_operations.all_combinations()
    ],
)
def test_a_step_has_no_more_operations_than_before(model, settings, ranks):
    for key, number in golden_operations.count(model, settings, ranks).items():
        assert number <= OPERATIONS[key], f"{key}: {number} operations, {OPERATIONS[key]} before"
        if number < OPERATIONS[key]:
            print(f"{key}: {number} operations, {OPERATIONS[key]} before; write them down with golden_operations.py")
