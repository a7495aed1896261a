"""Values of the model as JSON and back, by the types of their fields.

For what is kept in a file and read again by another version, perhaps damaged: everything that
is read is checked against the type it must have, and an error says where it stands. A field
that has a default may be missing; one that is not known is passed over.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast

T = TypeVar("T")
Reader = Callable[[Any], Any]

_UNENDING = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not have, as the text that stands for them."""


class DecodeError(ValueError):
    """What was read is not of the type it must have; `str()` says where and why."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place or 'the value'} {why}")
        self.why = why
        self.place = place

    def inside(self, step: str) -> DecodeError:
        """The same error, seen from one level further out."""
        dot = "" if not self.place or self.place.startswith("[") else "."
        return DecodeError(self.why, f"{step}{dot}{self.place}")


def to_json(value: Any) -> Any:
    """`value` as what `json.dumps` takes, also with ``allow_nan=False``."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [to_json(each) for each in value]
    names = _names(cast("Any", type(value)))
    return {name: to_json(getattr(value, name)) for name in names}


def from_json(cls: type[T], wire: Any) -> T:
    """The value of type `cls` that `to_json` wrote. Raises DecodeError for anything else."""
    return cast("T", reader_of(cast("Any", cls))(wire))


@cache
def _names(cls: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a {cls.__name__} cannot be written as JSON")
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def reader_of(kind: Any) -> Reader:
    """What reads a value of a type: a dataclass, an Enum, a container of such, a plain value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda wire: wire
    if origin in (Union, types.UnionType):
        return _one_of(inner)
    if origin is tuple:
        return _tuple(inner)
    if origin in (dict, collections.abc.Mapping):
        return _mapping(*inner)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast("type", kind))
    return _plain(kind)


def _plain(kind: type) -> Reader:
    wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    named = wanted.get(kind, "null")
    accepted = {int, float} if kind is float else {kind}

    def read(wire: Any) -> Any:
        # By the very type: a bool is an int to Python, and to nobody else.
        if type(wire) in accepted:
            return wire
        if kind is float and isinstance(wire, str) and wire in _UNENDING:
            return _UNENDING[wire]
        raise DecodeError(f"must be {named}, not {_shown(wire)}")

    return read


def _enum(kind: type[Enum]) -> Reader:
    def read(wire: Any) -> Any:
        try:
            return kind(wire)
        except ValueError:
            raise DecodeError(f"is {_shown(wire)}, which is no {kind.__name__.lower()}") from None

    return read


def _one_of(kinds: Sequence[Any]) -> Reader:
    """``X | None``, the one union that the model uses."""
    (kind,) = (each for each in kinds if each is not types.NoneType)
    read_one = reader_of(kind)
    return lambda wire: None if wire is None else read_one(wire)


def _tuple(inner: Sequence[Any]) -> Reader:
    """``tuple[X, ...]``, or ``tuple[X, Y]`` with just as many."""
    endless = inner[-1] is Ellipsis
    readers = [reader_of(kind) for kind in inner if kind is not Ellipsis]

    def read(wire: Any) -> Any:
        if not isinstance(wire, list):
            raise DecodeError(f"must be a list, not {_shown(wire)}")
        if not endless and len(wire) != len(readers):
            raise DecodeError(f"must be a list of {len(readers)}, not of {len(wire)}")
        found = []
        for number, each in enumerate(wire):
            read_one = readers[0] if endless else readers[number]
            try:
                found.append(read_one(each))
            except DecodeError as error:
                raise error.inside(f"[{number}]") from None
        return tuple(found)

    return read


def _mapping(key_kind: Any, kind: Any) -> Reader:
    read_one = reader_of(kind)

    def read(wire: Any) -> Any:
        if not isinstance(wire, dict):
            raise DecodeError(f"must be an object, not {_shown(wire)}")
        found = {}
        for key, each in wire.items():
            try:
                found[_key(key_kind, key)] = read_one(each)
            except DecodeError as error:
                raise error.inside(key) from None
        return found

    return read


def _key(kind: Any, key: str) -> Any:
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise DecodeError("must be a whole number") from None


def _dataclass(cls: type) -> Reader:
    # Looked up when first needed: a class may hold others of its own kind.
    hints: dict[str, Any] = {}
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(wire: Any) -> Any:
        if not isinstance(wire, dict):
            raise DecodeError(f"must be an object, not {_shown(wire)}")
        if not hints:
            known = typing.get_type_hints(cls)
            hints.update({name: known[name] for name in _names(cls)})
        missing = sorted(required - wire.keys())
        if missing:
            raise DecodeError("is missing", missing[0])
        found = {}
        for name, kind in hints.items():
            if name in wire:
                try:
                    found[name] = reader_of(kind)(wire[name])
                except DecodeError as error:
                    raise error.inside(name) from None
        return cls(**found)

    return read


def _shown(wire: Any) -> str:
    """What was there instead, in a few characters."""
    text = repr(wire)
    return text if len(text) <= 40 else f"{text[:37]}..."
