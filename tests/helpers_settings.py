"""Options of K-FAC by their names, wherever they are kept."""

import dataclasses
from collections.abc import Mapping

import dkfac

IN_EXPERIMENTAL = (
    {f.name for f in dataclasses.fields(dkfac.Settings().experimental)} - {"norm_form", "flattened"}
    if "experimental" in dkfac.Settings.__dataclass_fields__
    else set()
)
"""Empty on trees that have none: ``golden_run.py`` compares with older ones."""


def is_experimental(name, value):
    if not IN_EXPERIMENTAL:
        return False
    by_value = (name == "norm_form" and value in ("full", "diagonal")) or (
        name == "flattened" and isinstance(value, Mapping)
    )
    return by_value or name in IN_EXPERIMENTAL


def arranged(options):
    """Return options with the experimental ones in ``experimental={...}``."""
    extra = {name: value for name, value in options.items() if is_experimental(name, value)}
    kept = {name: value for name, value in options.items() if name not in extra}
    return kept | {"experimental": {**kept.get("experimental", {}), **extra}} if extra else kept


def value_of(settings, name):
    """Return a setting's value, wherever it is kept."""
    return getattr(settings.experimental if name in IN_EXPERIMENTAL else settings, name)
