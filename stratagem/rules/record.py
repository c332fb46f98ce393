"""Settings that travel: frozen dataclasses to plain dictionaries and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from stratagem.errors import UsageError


@dataclass(frozen=True)
class Record:
    """Base of what users write. `kind` in its JSON is the name of the class."""

    def to_json(self) -> dict[str, Any]:
        """Its settings as plain values."""
        return {"kind": type(self).__name__} | {
            field.name: getattr(self, field.name) for field in fields(self)
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """What `to_json` wrote; a name that is not known is refused."""
        return cls(**settings(plain, cls.__name__, {field.name for field in fields(cls)}))


def settings(plain: Mapping[str, Any], kind: str, known: set[str]) -> dict[str, Any]:
    """The settings in `plain`, which must be those of a `kind`."""
    given = dict(plain)
    if given.pop("kind", None) != kind:
        raise UsageError(f"{plain!r} does not describe a {kind}; its kind must be {kind!r}.")
    unknown = sorted(set(given) - known)
    if unknown:
        raise UsageError(
            f"{kind} has no setting {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(sorted(known)) or 'none'}. Do all tasks run one version?"
        )
    return given


def whole(what: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is a whole number of at least {least}, not {value!r}.")


def flag(what: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise UsageError(f"{what} is True or False, not {value!r}.")


def positive(what: str, value: object) -> None:
    """Refuse anything but a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{what} is a number above 0, not {value!r}.")
