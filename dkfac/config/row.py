"""One row per setting: its kind, the values allowed, why others are refused, and its help text.

In: the declaration of a field. Out: a dataclass field that carries its row; from rows come validation, the command
line and the table in the docs. Owns nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeVar, get_args

Topic = Literal["general", "statistics", "decomposition", "step", "distribution", "experimental"]
Made = TypeVar("Made", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """What is known of one setting. A row does not hold its name and default: the dataclass field does."""

    kind: Literal["choice", "number", "integer", "flag", "other"]
    topic: Topic
    help: str
    consequence: str = ""
    """Why other values are refused."""
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = True
    schedule: bool = False
    """Whether a function of the step is allowed."""
    optional: bool = False
    """Whether None is allowed."""
    words: str = ""
    """The values allowed, where they do not follow from the kind."""
    accepts: Callable[[Any], bool] | None = None
    """Kind "other": whether a value is allowed."""
    convert: Callable[[Any], Any] | None = None
    """Returns the value that is stored; what is not allowed is returned as it is, for validation to refuse."""

    @property
    def allowed(self) -> str:
        """The values allowed, in words."""
        match self.kind:
            case "choice":
                number = f" or an integer >= {self.low:g}" if math.isfinite(self.low) else ""
                return f"one of {', '.join(map(repr, self.choices))}{number}{self.words}"
            case "number":
                high = f" and {'<' if self.open_high else '<='} {self.high:g}" if math.isfinite(self.high) else ""
                schedule = ", or a function of the step" if self.schedule else ""
                return f"a number {'>' if self.open_low else '>='} {self.low:g}{high}{schedule}"
            case "integer":
                return f"an integer >= {self.low:g}"
            case "flag":
                return "True or False"
        return self.words

    def is_allowed(self, value: Any) -> bool:
        if value is None:
            return self.optional
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        match self.kind:
            case "choice" if math.isfinite(self.low) and is_integer:
                return bool(value >= self.low)
            case "choice":
                return isinstance(value, str) and value in self.choices
            case "number":
                return (self.schedule and callable(value)) or self.contains(value)
            case "integer":
                return is_integer and self.contains(value)
            case "flag":
                return isinstance(value, bool)
        return self.accepts is not None and self.accepts(value)

    def contains(self, value: Any) -> bool:
        """Whether a value is a finite number in the range."""
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            return False
        number = float(value)
        is_above = number > self.low if self.open_low else number >= self.low
        return is_above and (number < self.high if self.open_high else number <= self.high)


def refusal(name: str, value: object, allowed: str, consequence: str) -> ValueError:
    tail = f": {consequence}" if consequence else ""
    return ValueError(f"{name}={value!r} is not {allowed}{tail}")


# --- declarations -----------------------------------------------------------------------------------------------


def choice(default: Any, values: Any, topic: Topic, help: str, consequence: str, **more: Any) -> Any:
    """Declare a setting that is one of the values of a ``Literal``."""
    return _field(default, SettingRow(kind="choice", choices=get_args(values), topic=topic, help=help,
                               consequence=consequence, **more))  # fmt: skip


def numeric(default: float | None, topic: Topic, help: str, consequence: str, **more: Any) -> Any:
    """Declare a setting that is a number in a range."""
    return _field(default, SettingRow(kind="number", topic=topic, help=help, consequence=consequence, **more))


def integer(default: int | None, low: int, topic: Topic, help: str, consequence: str, **more: Any) -> Any:
    """Declare a setting that is an integer, ``low`` or more."""
    return _field(default, SettingRow(kind="integer", low=low, topic=topic, help=help, consequence=consequence, **more))


def flag(default: bool, topic: Topic, help: str) -> Any:
    """Declare a setting that is True or False."""
    return _field(default, SettingRow(kind="flag", topic=topic, help=help))


def other(default: Any, topic: Topic, help: str, consequence: str, **more: Any) -> Any:
    """Declare a setting whose values are described by ``words`` and known by ``accepts``."""
    return _field(default, SettingRow(kind="other", topic=topic, help=help, consequence=consequence, **more))


def _field(default: Any, row: SettingRow) -> Any:
    return dataclasses.field(default=default, metadata={"row": row})


def rows_by_name(settings: Any) -> dict[str, SettingRow]:
    """Return the rows of a dataclass of settings, or of one of its objects, by name."""
    return {field.name: field.metadata["row"] for field in dataclasses.fields(settings)}


# --- use --------------------------------------------------------------------------------------------------------


def check_rows(settings: Any) -> None:
    """Refuse the first value that its row does not allow. Nothing is written."""
    for name, row in rows_by_name(settings).items():
        value = getattr(settings, name)
        if not row.is_allowed(value):
            raise refusal(name, value, row.allowed, row.consequence)


def converted(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are stored: a dtype as its name, a list as a tuple."""
    rows = rows_by_name(settings)
    convert = {name: rows[name].convert if name in rows else None for name in options}
    return {name: value if (to := convert[name]) is None else to(value) for name, value in options.items()}


def plain_values(settings: Any) -> dict[str, Any]:
    """Return settings as values for JSON; a function shows as ``"<function>"``."""
    return {name: _plain(getattr(settings, name)) for name in rows_by_name(settings)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain_values(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return "<function>" if callable(value) else value


def prepared_by(prepare: Callable[[type, dict[str, Any]], dict[str, Any]]) -> Callable[[Made], Made]:
    """Decorate a dataclass so that its options pass through ``prepare`` before the frozen object is made."""

    def decorate(made: Made) -> Made:
        plain: Any = made.__init__  # type: ignore[misc]

        @functools.wraps(plain)
        def init(self: Any, **options: Any) -> None:
            plain(self, **prepare(made, options))

        setattr(made, "__init__", init)  # noqa: B010
        return made

    return decorate
