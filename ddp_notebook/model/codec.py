"""The one codec: values as JSON and back, by the types of their fields.

A dataclass is an object with its fields, an Enum its value, a tuple a list, a mapping an object.
`decode` checks every value's type, and its error says where the mismatch is: a file may be damaged,
or of another version. A field that has a default may be missing; an unknown one is ignored.

A class that is written differently declares so itself, in one of three ways:

- A field with ``metadata=OMIT_DEFAULT``: it is not written while it has its default.
- A class variable ``kinds`` of a base class: its subclasses by their class variable ``kind``,
  which is written first and says which of them to read.
- A method ``to_wire() -> X`` and a class method ``from_wire(X)``: it is written as that X.

Readers and writers are made once for each type: thousands of events a second pass through here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from json import detect_encoding
from json import dumps as _dumps
from json import loads as _loads
from operator import attrgetter
from typing import Any, TypeVar, Union, cast

T = TypeVar("T")
Convert = Callable[[Any], Any]

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not have, as the text that stands for them."""
_AS_IT_IS = frozenset({str, int, bool, type(None)})
"""Types that are the same in JSON."""
_MISSING = object()
_LONG_NUMBER = re.compile(r"\d{20}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Where one may stand in JSON text, with or without the other half."""

OMIT_DEFAULT: Mapping[Any, Any] = types.MappingProxyType({"omit default": True})
"""Metadata of a dataclass's field: the field is omitted while it has its default."""


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


def encode(value: Any) -> Any:
    """`value` as `json.dumps` takes it. Raises TypeError for a value of an unsupported type.

    Fields of type Any are not checked: they are JSON already.
    """
    return _writer_of_class(cast("Any", type(value)))(value)


def decode(cls: type[T], wire: Any) -> T:
    """The value of type `cls` that `encode` wrote. Raises DecodeError for anything else."""
    return cast("T", _reader(cast("Any", cls))(wire))


def dumps(wire: Any) -> str:
    """`wire` as a text of strict JSON: a number that JSON does not have becomes a text."""
    try:
        return _dumps(wire, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, and only inside fields of type Any
        return _dumps(_finite(wire), allow_nan=False, separators=(",", ":"))


def loads(data: str | bytes, *, of_others: bool = False) -> Any:
    """What JSON text says, with `readable` texts. Raises ValueError for what is no JSON.

    In a file `of_others` numbers have 64 bits, as all of ours have: calculations with larger ones
    fail somewhere.
    """
    text = data if isinstance(data, str) else data.decode(detect_encoding(data), "replace")
    try:
        bounded = of_others and _LONG_NUMBER.search(text)
        wire = _loads(text, parse_int=_whole_number if bounded else None)
        return readable(wire) if _SURROGATE.search(text) else wire
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _whole_number(digits: str) -> int:
    """One of 64 bits. Raises ValueError."""
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{digits[:20]}... is no number that can stand there")
    return number


def readable(wire: Any) -> Any:
    """`wire` with texts that can be shown: half of a pair of surrogates becomes "?".

    Python makes such texts of a file name in another encoding, and of UTF-16 that was cut.
    """
    if isinstance(wire, str):
        return wire if wire.isascii() else wire.encode("utf-8", "replace").decode()
    if isinstance(wire, dict):
        return {readable(key): readable(item) for key, item in wire.items()}
    return [readable(item) for item in wire] if isinstance(wire, list | tuple) else wire


def _finite(wire: Any) -> Any:
    if isinstance(wire, float):
        return _number(wire)
    if isinstance(wire, dict):
        return {_finite(key): _finite(item) for key, item in wire.items()}
    return [_finite(item) for item in wire] if isinstance(wire, list | tuple) else wire


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


# -- writing: None in place of a writer means that the value is written as it is --------------


@cache
def _writer_of_class(cls: type) -> Convert:
    """What writes a value whose type is known from the value alone."""
    if dataclasses.is_dataclass(cls):
        return _write_dataclass(cls)
    if issubclass(cls, Mapping):
        return lambda value: {str(encode(key)): encode(item) for key, item in value.items()}
    if issubclass(cls, tuple | list):
        return lambda value: [encode(item) for item in value]
    if issubclass(cls, Enum):
        return attrgetter("value")
    if issubclass(cls, float):
        return _number
    if issubclass(cls, str | int | types.NoneType):
        return lambda value: value
    raise TypeError(f"a {cls.__name__} cannot be written as JSON")


@cache
def _writer(kind: Any) -> Convert | None:
    """What writes a value of the declared type `kind`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind in _AS_IT_IS:
        return None
    if kind is float:
        return _number
    if origin in (Union, types.UnionType):
        return _write_optional(_writer(_not_none(inner)))
    if origin is tuple:
        return _write_tuple([_writer(each) for each in inner if each is not Ellipsis], inner)
    if origin in (dict, collections.abc.Mapping):
        return _write_mapping(*inner)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return attrgetter("value")
    return encode if "kinds" in vars(kind) else _write_dataclass(kind)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _write_optional(write: Convert | None) -> Convert | None:
    return write and (lambda value: None if value is None else write(value))


def _write_tuple(writers: list[Convert | None], inner: tuple[Any, ...]) -> Convert:
    if inner[-1] is not Ellipsis:
        return lambda value: [
            write(item) if write else item for write, item in zip(writers, value, strict=True)
        ]
    write_item = writers[0]
    return (lambda value: [write_item(item) for item in value]) if write_item else list


def _write_mapping(key_kind: Any, kind: Any) -> Convert:
    write = _writer(kind)
    if key_kind is not str:
        return lambda value: {
            str(encode(key)): write(item) if write else item for key, item in value.items()
        }
    return (lambda value: {key: write(item) for key, item in value.items()}) if write else dict


def _write_dataclass(cls: Any) -> Convert:
    if hasattr(cls, "to_wire"):
        return lambda value: encode(value.to_wire())
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    omitted = [(f.name, f.default) for f in fields if f.metadata == OMIT_DEFAULT]
    if hasattr(cls, "kinds"):
        names.insert(0, "kind")
    values_of: Callable[[Any], Iterable[Any]] = (
        attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, n) for n in names]
    )
    # Made when first needed: a class may hold others of its own type.
    writers: list[tuple[str, Convert]] | None = None

    def write(value: Any) -> dict[str, Any]:
        nonlocal writers
        if writers is None:
            made = [(field.name, _writer(_hints(cls)[field.name])) for field in fields]
            writers = [(name, convert) for name, convert in made if convert is not None]
        wire = dict(zip(names, values_of(value), strict=True))
        for name, convert in writers:
            wire[name] = convert(wire[name])
        for name, default in omitted:
            if getattr(value, name) == default:
                del wire[name]
        return wire

    return write


# -- reading -----------------------------------------------------------------------------------


@cache
def _reader(kind: Any) -> Convert:
    """What reads a value of a type: a dataclass, an Enum, a container of such, a plain value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda wire: wire
    if origin in (Union, types.UnionType):
        read = _reader(_not_none(inner))
        return lambda wire: None if wire is None else read(wire)
    if origin is tuple:
        return _read_tuple(inner)
    if origin in (dict, collections.abc.Mapping):
        return _read_mapping(*inner)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _read_enum(kind)
    if dataclasses.is_dataclass(kind):
        return _read_kind(kind) if "kinds" in vars(kind) else _read_dataclass(kind)
    return _read_plain(kind)


def _not_none(kinds: Iterable[Any]) -> Any:
    """The X of ``X | None``, the one union that the model uses."""
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    return kind


def _read_plain(kind: type) -> Convert:
    wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    named = wanted.get(kind, "null")
    accepted = {int, float} if kind is float else {kind}

    def read(wire: Any) -> Any:
        # The exact type: in Python a bool is an int, but not in JSON.
        if type(wire) in accepted:
            return wire
        if kind is float and isinstance(wire, str) and wire in _NOT_FINITE:
            return _NOT_FINITE[wire]
        raise DecodeError(f"must be {named}, not {_shown(wire)}")

    return read


def _read_enum(kind: type[Enum]) -> Convert:
    members = {member.value: member for member in kind}

    def read(wire: Any) -> Any:
        try:
            return members[wire]
        except (KeyError, TypeError):
            raise DecodeError(f"is {_shown(wire)}, which is no {kind.__name__.lower()}") from None

    return read


def _read_tuple(inner: tuple[Any, ...]) -> Convert:
    """``tuple[X, ...]``, or ``tuple[X, Y]`` with just as many."""
    endless = inner[-1] is Ellipsis
    readers = [_reader(kind) for kind in inner if kind is not Ellipsis]

    def read(wire: Any) -> Any:
        if not isinstance(wire, list):
            raise DecodeError(f"must be a list, not {_shown(wire)}")
        if not endless and len(wire) != len(readers):
            raise DecodeError(f"must be a list of {len(readers)}, not of {len(wire)}")
        values = []
        for number, item in enumerate(wire):
            try:
                values.append(readers[0 if endless else number](item))
            except DecodeError as error:
                raise error.inside(f"[{number}]") from None
        return tuple(values)

    return read


def _read_mapping(key_kind: Any, kind: Any) -> Convert:
    read_key = _read_number if key_kind is int else _reader(key_kind)
    read_item = _reader(kind)

    def read(wire: Any) -> Any:
        if not isinstance(wire, dict):
            raise DecodeError(f"must be an object, not {_shown(wire)}")
        if kind is Any:
            return wire
        values = {}
        for key, item in wire.items():
            try:
                values[read_key(key)] = read_item(item)
            except DecodeError as error:
                raise error.inside(key) from None
        return values

    return read


def _read_number(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise DecodeError("must be a whole number") from None


def _read_kind(cls: Any) -> Convert:
    """A value of one of the subclasses in ``cls.kinds``, by its ``kind``."""

    def read(wire: Any) -> Any:
        kind = wire.get("kind") if isinstance(wire, dict) else None
        subclass = cls.kinds.get(kind) if isinstance(kind, str) else None
        if subclass is None:
            raise DecodeError(f"is not an {cls.__name__.lower()}: {_shown(wire)}")
        return _reader(subclass)(wire)

    return read


def _read_dataclass(cls: Any) -> Convert:
    if hasattr(cls, "to_wire"):
        return lambda wire: cls.from_wire(decode(_hints(cls.to_wire)["return"], wire))
    kind = cls.kind if hasattr(cls, "kinds") else None
    # Made when first needed: a class may hold others of its own type.
    fields: list[tuple[str, Any, Convert, bool]] | None = None

    def read(wire: Any) -> Any:
        nonlocal fields
        _check_object(wire, kind)
        if fields is None:
            fields = _readers(cls)
        values = {}
        for name, exact, read_one, required in fields:
            value = wire.get(name, _MISSING)
            if value is _MISSING:
                if required:
                    raise DecodeError("is missing", name)
                continue
            if type(value) is not exact:  # most are text and numbers, which need no call
                try:
                    value = read_one(value)
                except DecodeError as error:
                    raise error.inside(name) from None
            values[name] = value
        try:
            return cls(**values)
        except ValueError as error:  # what its __post_init__ refuses
            raise DecodeError(f"is not valid: {error}") from None

    return read


def _readers(cls: Any) -> list[tuple[str, Any, Convert, bool]]:
    """Of each field its name, its type, what reads it, and whether it must be there."""
    return [
        (
            field.name,
            _hints(cls)[field.name],
            _reader(_hints(cls)[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    ]


def _check_object(wire: Any, kind: str | None) -> None:
    if not isinstance(wire, dict):
        raise DecodeError(f"must be an object, not {_shown(wire)}")
    if kind is not None and wire.get("kind", kind) != kind:
        raise DecodeError(f"is {_shown(wire.get('kind'))} and not {kind!r}", "kind")


def _shown(wire: Any) -> str:
    """What was there instead, in a few characters."""
    text = repr(wire)
    return text if len(text) <= 40 else f"{text[:37]}..."
