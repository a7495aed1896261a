"""Values as short texts, made while the main thread runs: none of their code is run.

A user's `__repr__` may block, raise, or start a copy from a GPU. So only values of Python's own
types are written out; of a tensor its shape, type and device, or its number if it has no dimensions
and is in this host's memory; of other objects the name of their class.
"""

from __future__ import annotations

import collections
import enum
import itertools
import sys
import types
from collections.abc import Iterable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import torch

LONGEST = 120
"""The most characters of a text."""
_LONGEST_STRING = 60
_MOST_SORTED = 1000
"""Items of a set that are sorted; larger sets are shown in Python's order."""
_MOST_ITEMS = 6
NAME_OF = type.__dict__["__name__"].__get__
"""A class's name, without calling its metaclass."""
MRO_OF = type.__dict__["__mro__"].__get__
_MEMBER_OF = enum.Enum.__dict__["__dict__"].__get__
"""Return an enum member's value, without calling its class."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Classes of torch's own: a subclass may be anything."""
_WRITTEN_OUT = (
    bool,
    float,
    complex,
    type(None),
    type(Ellipsis),
    range,
    slice,
    timedelta,
    date,
    Decimal,
)
_BY_NAME = (*_FUNCTIONS, types.ModuleType)
_TORCHS_OWN = (torch.device, torch.dtype, torch.Size)
_PATHS = (type(Path()), type(PurePath()))


def of(value: Any, depth: int = 0) -> str:
    """`value` as a text of at most `LONGEST` characters. Never raises."""
    try:
        text = _text(value, depth)
    except Exception:  # noqa: BLE001  # it may change while it is looked at
        text = f"<{class_name(value)}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def is_whole(value: Any) -> bool:
    """Return whether the text of a value says all of it: equal texts are equal values."""
    kind = type(value)
    written = kind in _WRITTEN_OUT or kind in _TORCHS_OWN or kind in _PATHS
    return written or kind in _BY_NAME or (kind is datetime and _is_plain_time(value))


def class_name(value: Any) -> str:
    """The name of its class."""
    return str(NAME_OF(type(value)))[:_LONGEST_STRING]


def inherits(value: Any, base: type) -> bool:
    """Return whether its class is `base` or a subclass, without calling the class or metaclass."""
    return base in MRO_OF(type(value))


def is_array(value: Any) -> bool:
    """Return whether it is an array of NumPy's own type; NumPy is not loaded for that."""
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None)


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is int:
        bits = value.bit_length()
        return repr(value) if bits <= 128 else f"<int of {bits:,} bits>"
    if kind in (str, bytes):
        more = f"… of {len(value):,}" if len(value) > _LONGEST_STRING else ""
        return f"{value[:_LONGEST_STRING]!r}{more}"
    if kind in TENSORS:
        word = "tensor" if kind is torch.Tensor else "Parameter"
        if not value.dim() and value.is_cpu:
            number = value.item()
            text = f"{number:.6g}" if isinstance(number, float) else repr(number)
            return _array(f"{word} {text}", value).replace("() ", " ")
        return _array(word, value, value.device)
    if kind in _FOLDED:
        return _folded(value, kind, depth)
    if kind is slice or kind is range:
        parts = (of(part, depth + 1) for part in (value.start, value.stop, value.step))
        return f"{class_name(value)}({', '.join(parts)})"
    if kind in _WRITTEN_OUT or kind in _TORCHS_OWN or kind in _PATHS:
        return repr(value)
    return _by_class(value, kind)


def _by_class(value: Any, kind: type) -> str:
    """Values of other classes, by the name of the class."""
    if is_array(value):
        return _array("array", value)
    if kind in _FUNCTIONS:
        return f"<function {str(value.__name__)[:_LONGEST_STRING]}>"
    if kind is type:
        return f"<class {NAME_OF(value)}>"
    if kind is datetime and _is_plain_time(value):
        return repr(value)
    if kind is types.ModuleType:
        return f"<module {str(vars(value).get('__name__', ''))[:_LONGEST_STRING]}>"
    if enum.Enum in MRO_OF(kind):
        return _member(value)
    for base in (dict, list, tuple, set, frozenset, str, collections.deque):
        if base in MRO_OF(kind):
            return f"<{class_name(value)} of {base.__len__(value)}>"
    return f"<{class_name(value)}>"


def _is_plain_time(value: datetime) -> bool:
    """Return whether its time zone, if any, is Python's own: another one has code of its own."""
    return type(value.tzinfo) in (type(None), timezone)


def _member(value: Any) -> str:
    """``Color.RED``, ``Access.READ|WRITE``; of flags that have no name their number."""
    own = _MEMBER_OF(value)
    name, content = own.get("_name_"), own.get("_value_")
    if type(name) is str:
        return f"{class_name(value)}.{name}"
    return f"{class_name(value)}({content})" if type(content) is int else f"<{class_name(value)}>"


def _array(word: str, value: Any, device: object = "") -> str:
    """Shape, type and device, without values."""
    shape = ", ".join(str(size) for size in tuple(value.shape)[:8])
    kind = str(value.dtype).removeprefix("torch.")
    return " ".join(f"{word}({shape}) {kind} {device}".split())


def _folded(value: Any, kind: type, depth: int) -> str:
    """The first items between the brackets of their kind."""
    opened, closed = _FOLDED[kind]
    count = len(value)
    if depth >= 2 and count:
        return f"{opened}…{closed}"
    if kind is dict:
        some: Iterable[tuple[Any, Any]] = itertools.islice(value.items(), _MOST_ITEMS)
        parts = [f"{of(key, depth + 1)}: {of(item, depth + 1)}" for key, item in some]
    else:
        items = _in_order(value) if kind in (set, frozenset) else value
        parts = [of(item, depth + 1) for item in itertools.islice(items, _MOST_ITEMS)]
    if count > _MOST_ITEMS:
        parts.append(f"… of {count:,}")
    lonely = "," if kind is tuple and count == 1 else ""
    return f"{opened}{', '.join(parts)}{lonely}{closed}"


def _in_order(items: Iterable[Any]) -> Iterable[Any]:
    """A sorted set of numbers or texts: Python's order differs between ranks."""
    some = list(itertools.islice(items, _MOST_SORTED + 1))
    plain = len(some) <= _MOST_SORTED and {type(item) for item in some} in ({int}, {str})
    return sorted(some) if plain else items


_FOLDED: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
