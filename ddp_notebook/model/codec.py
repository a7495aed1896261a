"""The one codec: values as JSON and back, by the types of their fields.

A dataclass is an object with its fields, a msgspec.Struct too, with its tag; an Enum is its value,
a tuple a list, a mapping an object; bytes are base64. `decode` is msgspec's: it checks every
value's type, and its error says where the mismatch is, as a file may be damaged, or of another
version. A field that has a default may be missing; an unknown one is ignored.

`encode` is our own. Two things that files of this format have are not known to msgspec: a number
that JSON does not have is a text, and a field of a dataclass with ``metadata=OMIT_DEFAULT`` is not
written while it has its default.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from json import JSONEncoder, detect_encoding
from json import loads as _loads
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_AS_IT_IS = frozenset({str, int, bool, type(None)})
"""Types that are the same in JSON."""
_LONG_NUMBER = re.compile(r"\d{20}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Where one may stand in JSON text, with or without the other half."""

OMIT_DEFAULT: Mapping[Any, Any] = types.MappingProxyType({"omit default": True})
"""Metadata of a dataclass's field: the field is omitted while it has its default."""


class DecodeError(ValueError):
    """The value read is not of the expected type; `str()` says where and why."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place or 'the value'}: {why}")
        self.why = why
        self.place = place


def encode(value: Any) -> Any:
    """Return `value` as `json.dumps` takes it; what it cannot take is left for it to refuse."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is list:
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    if kind is bytes:
        return base64.b64encode(value).decode()
    if isinstance(value, msgspec.Struct):
        return encode(tagged(value))
    if not dataclasses.is_dataclass(kind):
        return value
    wire = {}
    for name, default in _fields(kind):
        item = getattr(value, name)
        if default is dataclasses.MISSING or item != default:
            wire[name] = item if type(item) in _AS_IT_IS else encode(item)
    return wire


def tagged(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of `value` as they are, with its tag first if it has one."""
    config = value.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    return {**tag, **msgspec.structs.asdict(value)}


@cache
def _fields(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass, each with the default for which it is omitted."""
    return tuple(
        (each.name, each.default if each.metadata == OMIT_DEFAULT else dataclasses.MISSING)
        for each in dataclasses.fields(cls)
    )


def decode(cls: type[T], wire: Any) -> T:
    """Return the value of type `cls` that `encode` wrote. Raises DecodeError for anything else."""
    try:
        try:
            return msgspec.convert(wire, cls, str_keys=True)
        except msgspec.ValidationError as error:
            if "Expected `float" not in str(error):
                raise
        # Maybe a number that JSON does not have: msgspec reads its text as one only if it need not
        # be strict. It then reads "3" as a number too, and the value is of type `cls` all the same.
        return msgspec.convert(wire, cls, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at ")
        raise DecodeError(why[0].lower() + why[1:], place.strip("`").lstrip("$.")) from None
    except RecursionError:
        raise DecodeError("is nested too deep") from None


def dumps(wire: Any) -> str:
    """Return `wire` as a text of strict JSON: a number that JSON does not have becomes a text."""
    try:
        return _STRICT.encode(wire)
    except ValueError:  # rare, and only inside fields of type Any
        return _STRICT.encode(encode(wire))


_STRICT = JSONEncoder(allow_nan=False, separators=(",", ":"))


def loads(data: str | bytes, *, of_others: bool = False) -> Any:
    """Return what JSON text says, with `readable` texts. Raises ValueError for what is no JSON.

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
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{digits[:20]}... is too large a number")
    return number


def readable(wire: Any) -> Any:
    """Return `wire` with texts that can be shown: half of a pair of surrogates becomes "?".

    Python makes such texts of a file name in another encoding, and of UTF-16 that was cut.
    """
    if isinstance(wire, str):
        return wire if wire.isascii() else wire.encode("utf-8", "replace").decode()
    if isinstance(wire, dict):
        return {readable(key): readable(item) for key, item in wire.items()}
    return [readable(item) for item in wire] if isinstance(wire, list | tuple) else wire
