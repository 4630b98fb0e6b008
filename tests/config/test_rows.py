"""One row per setting, one row per restriction, and the texts that are made of them."""

import re
import typing
from pathlib import Path
from typing import Literal

import pytest
from helpers_settings import arranged

import dkfac
from dkfac.config import restrictions
from dkfac.config.row import rows_by_name
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.experimental.settings import ExperimentalSettings
from dkfac.tools import settings_table
from dkfac.tools.cli.main import main

DOCS = Path(__file__).parent.parent.parent / "docs" / "settings.md"
KINDS = (Settings, ExperimentalSettings)
ROWS = [(kind, name) for kind in KINDS for name in rows_by_name(kind)]


def test_the_documentation_has_every_setting_and_every_restriction():
    """Written by ``python -m dkfac.tools.settings_table docs/settings.md``."""
    text = DOCS.read_text()
    assert settings_table.updated(text) == text
    assert settings_table.markdown() in text


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_row_agrees_with_the_annotation_of_its_field(kind, name):
    row, hint = rows_by_name(kind)[name], typing.get_type_hints(kind)[name]
    parts = (hint, *typing.get_args(hint))
    choices = {c for part in parts if typing.get_origin(part) is Literal for c in typing.get_args(part)}
    assert set(row.choices) == choices or row.kind == "other"
    assert row.optional == (type(None) in parts)
    assert row.schedule == (name in SCHEDULES)
    assert (row.kind == "flag") == (hint is bool)
    assert (row.kind == "integer") == (int in parts and not choices and row.kind != "other")
    assert row.help.endswith(".")
    assert row.consequence or row.kind == "flag" or name in ("cluster", "experimental")


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_default_is_allowed_and_is_stored_as_it_is(kind, name):
    default = kind.__dataclass_fields__[name].default
    assert rows_by_name(kind)[name].is_allowed(default)
    assert getattr(kind(**{name: default}), name) == default


def test_validation_writes_nothing():
    """Values are replaced before the object is made: no source of this package sets a field of a frozen object."""
    made = Settings(skip=["a"], warmup_refresh=[5, 50], curvature="adam-eigen")
    assert (made.skip, made.warmup_refresh, made.rescale) == (("a",), (5, 50), "none")
    for path in Path(restrictions.__file__).parent.glob("*.py"):
        assert "__setattr__" not in path.read_text(), path


def test_help_lists_every_setting_with_its_values(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    for kind, name in ROWS:
        shown = name if kind is Settings else f"experimental.{name}"
        lines = [line for line in said.splitlines() if line.split()[:1] == [shown]]
        assert len(lines) == 1
        assert all(f'"{choice}"' in lines[0] for choice in rows_by_name(kind)[name].choices)


EXAMPLES = [
    {"inverse_interval": 15},
    {"overlap": True, "wire_dtype": "float16"},
    {"overlap": True, "fisher": "exact", "fisher_loss": "mse"},
    {"wire_form": "rows", "weight_sharing": "reduce"},
    {"cluster": "h200", "strategy": "sharded"},
    {"worker_fraction": 0.5},
    {"inverse_backend": "threads"},
    {"inverse_lag": 101},
    {"inverse_lag": 3, "spread_refresh": 2},
    {"inverse_lag": 3, "inverse_backend": "stream", "tf32": True},
    {"staleness": "change", "overlap": True},
    {"staleness": "change", "wire_form": "rows"},
    {"staleness": "change", "strategy": "local"},
    {"staleness": "change", "inverse_lag": 3},
    {"staleness": "change", "spread_refresh": 2},
    {"staleness": "change", "cuda_graph": True},
    {"staleness": "change", "curvature": "ekfac"},
    {"staleness": "basis", "solver": "cholesky"},
    {"staleness_threshold": 0.5},
    {"staleness_min_rows": 10},
    {"max_interval": 10},
    {"fisher_fraction": 0.5},
    {"fisher": "exact"},
    {"flattened": {"a": 2}, "solver": "cholesky"},
    {"curvature": "adaptive", "rescale": "norm"},
    {"curvature": "adam-eigen", "rescale": "norm"},
    {"curvature": "kfac", "basis_dtype": "bfloat16"},
    {"curvature": "kfac", "rescale": "kl-clip", "cuda_graph": True},
    {"curvature": "ekfac", "solver": "cholesky"},
]
ALWAYS = [row for row in restrictions.RESTRICTIONS if row.where == "always"]


@pytest.mark.parametrize(("row", "options"), list(zip(ALWAYS, EXAMPLES, strict=True)))
def test_each_restriction_refuses_its_example_with_its_own_message(row, options):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Settings(**arranged(options))
    pieces = re.split(r"\{s\.[^}]*\}", row.message.replace("{{", "{").replace("}}", "}"))
    assert re.fullmatch(".*".join(map(re.escape, pieces)), str(refused.value))
    assert set(options) & set(row.names)


@pytest.mark.parametrize("row", restrictions.RESTRICTIONS)
def test_a_restriction_names_settings_and_does_not_refuse_the_defaults(row):
    assert set(row.names) <= {name for _, name in ROWS}
    assert not row.when(Settings())
    assert row.message.format(s=Settings())


def test_what_needs_an_optimizer_or_no_roles_is_refused_by_the_same_table():
    with pytest.raises(ValueError, match=r"use KFAC\(model, optimizer\)"):
        restrictions.check_combinations(dkfac.Settings(share="weights"), "without an optimizer")
    with pytest.raises(ValueError, match="roles require"):
        restrictions.check_combinations(dkfac.Settings(spread_refresh=2), "with roles")
    restrictions.check_combinations(dkfac.Settings(), "with roles")
