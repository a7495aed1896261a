"""Digests that distinguish values with equal texts: cut texts, long lists, deep dicts, objects.

Nothing of the user's is run: values of Python's own types are read by those types, and an object
is what its `__dict__` has, read past its class.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import marshal
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic

from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.safe_repr import MRO_OF, NAME_OF, TENSORS
from ddp_notebook.rank.variables.tensors import array_bytes, bytes_of

_SECONDS = 0.02
_FULL_SECONDS = 0.035
"""Of CPU time for all digests of one answer; where one value alone is asked for."""
_CHUNK = 512
_PART = 2**20
"""Characters of a text that are read at a time."""
_MOST_SORTED = 100_000
"""Keys of a dict or items of a set: no clock is read while they are sorted."""
_MOST_AT_ONCE = 200_000
"""In items and characters."""
_DEEPEST_AT_ONCE = 5
_DEEPEST = 12
_SCALARS = frozenset((int, float, complex, bool, type(None), type(Ellipsis)))
_TEXTS = frozenset((str, bytes, bytearray))
_LISTS = (list, tuple)
_SIZED = frozenset((str, bytes, *_LISTS))
_PLAIN = _SCALARS | _SIZED
_SETS = (set, frozenset)
_MODULE_OF = type.__dict__["__module__"].__get__
_NAMES_OF = type.__dict__["__dict__"].__get__
_FLAGS_OF = type.__dict__["__flags__"].__get__
_HEAPTYPE, _IMMUTABLETYPE = 1 << 9, 1 << 8
"""Of the flags of a class, as in CPython's `object.h`."""
_NOT_LOOKED_INTO = (sys.stdlib_module_names | {"torch", "numpy", "ddp_notebook"}) - {
    "argparse",
    "types",
    "enum",
    "fractions",
    "uuid",
}
"""Packages whose objects are compared by their class alone: much in them, such as locks, is each
rank's own."""
_VERSION = 2
"""The last version of `marshal` that always writes equal values as equal bytes."""


class _TimeIsUp(Exception):
    """The time was up before a value was read to its end."""


class Digester:
    """Makes digests until its time is up. Without `objects`, of Python's own types only."""

    def __init__(self, *, objects: bool, seconds: float = 0.0) -> None:
        self._objects = objects
        self.opaque = False
        """True when a part is compared by its class alone: then equal digests prove nothing."""
        seconds = seconds or (_FULL_SECONDS if objects else _SECONDS)
        self._until_s = time.thread_time() + seconds

    def of(self, value: Any) -> str:
        """The digest of a value; empty where it was not read to its end. Raises nothing."""
        if not self._objects and type(value) not in (*_TEXTS, *_LISTS, *_SETS, dict):
            return ""
        try:
            return f"{self._crc(value, 0):08x}"
        except Exception:  # noqa: BLE001  # it may change while it is looked at
            return ""

    def _crc(self, value: Any, depth: int) -> int:
        kind = type(value)
        if kind in _SCALARS:
            return zlib.crc32(marshal.dumps(value, _VERSION))
        if time.thread_time() > self._until_s:
            raise _TimeIsUp
        name = zlib.crc32(safe_repr.class_name(value).encode())
        if kind in _TEXTS:
            parts = (value[at : at + _PART] for at in range(0, len(value), _PART))
            return self._blocks(map(_encoded, parts), name)
        if depth >= _DEEPEST:
            self.opaque = True
            return name
        if kind in _LISTS:
            return self._items(value, name, depth)
        if kind is dict:
            return self._dict(value, name, depth)
        if kind in _SETS:
            return self._unordered(list(value), name, depth)
        return self._other(value, name, depth)

    def _items(self, items: Sequence[Any], crc: int, depth: int) -> int:
        """The digest of the items of a list or tuple, in order."""
        for begin in range(0, len(items), _CHUNK):
            chunk = list(items[begin : begin + _CHUNK])
            if _is_plain(chunk):
                crc = zlib.crc32(marshal.dumps(chunk, _VERSION), crc)
                if time.thread_time() > self._until_s:
                    raise _TimeIsUp
            else:
                for item in chunk:
                    crc = zlib.crc32(self._crc(item, depth + 1).to_bytes(4, "little"), crc)
        return crc

    def _dict(self, value: dict[Any, Any], crc: int, depth: int) -> int:
        """The digest of a dict; the order does not count, as for Python's `==`."""
        if len(value) > _MOST_SORTED:
            raise _TimeIsUp
        keys = list(dict.keys(value))
        if {type(key) for key in keys} in ({str}, {int}):
            keys.sort()
            values = [dict.__getitem__(value, key) for key in keys]
            return self._items(values, self._items(keys, crc, depth), depth)
        return self._unordered(list(dict.items(value)), crc, depth)

    def _unordered(self, items: list[Any], crc: int, depth: int) -> int:
        if len(items) > _MOST_SORTED:
            raise _TimeIsUp
        if {type(item) for item in items} in ({str}, {int}):
            return self._items(sorted(items), crc, depth)
        total = sum(self._crc(item, depth + 1) for item in items)
        return zlib.crc32(total.to_bytes(8, "little"), crc)

    def _other(self, value: Any, crc: int, depth: int) -> int:
        if type(value) in TENSORS:
            return self._values(value, bytes_of(value), value.numel(), crc)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is getattr(numpy, "ndarray", None):
            return self._values(value, array_bytes(value), value.size, crc)
        if numpy is not None and _is_number(numpy, value):
            return zlib.crc32(numpy.generic.tobytes(value), crc)
        if type(value) is types.FunctionType:
            return self._function(value, crc)
        if safe_repr.inherits(value, type) or safe_repr.is_whole(value):
            return zlib.crc32(_written(value).encode(), crc)
        return self._object(value, crc, depth)

    def _values(self, value: Any, blocks: Iterable[Any], size: int, crc: int) -> int:
        """The digest of a tensor or an array with `size` values, which are in `blocks`."""
        crc = zlib.crc32(safe_repr.of(value).encode(), crc)
        whole = self._blocks(blocks, crc)
        self.opaque |= bool(whole == crc and size)
        return whole

    def _function(self, function: types.FunctionType, crc: int) -> int:
        """Of where it is defined. What it closes over is not looked at, nor which lambda of a line
        it is: its code has calls of ours on ranks with breakpoints."""
        code = function.__code__
        self.opaque |= bool(function.__closure__) or code.co_name == "<lambda>"
        place = f"{code.co_qualname} {code.co_filename} {code.co_firstlineno}"
        return zlib.crc32(place.encode("utf-8", "surrogatepass"), crc)

    def _object(self, value: Any, crc: int, depth: int) -> int:
        """The digest of an object: its content as one of Python's own types, and its attributes."""
        content, own = _content(value), self._attributes(value)
        if content is not None:
            crc = zlib.crc32(self._crc(content, depth + 1).to_bytes(4, "little"), crc)
        elif own is None or _has_hidden(type(value)):
            self.opaque = True
            crc = zlib.crc32(safe_repr.of(value).encode(), crc)
        return self._dict(own, crc, depth) if own else crc

    def _blocks(self, blocks: Iterable[Any], crc: int) -> int:
        for block in blocks:
            crc = zlib.crc32(block, crc)
            if time.thread_time() > self._until_s:
                raise _TimeIsUp
        return crc

    def _attributes(self, value: Any) -> dict[str, Any] | None:
        """The attributes of an object of the user's classes; None for any other."""
        kind = type(value)
        module = str(_MODULE_OF(kind)).partition(".")[0]
        if module in _NOT_LOOKED_INTO:
            return None
        own = (_NAMES_OF(base).get("__dict__") for base in MRO_OF(kind))
        descriptor = next((d for d in own if type(d) is types.GetSetDescriptorType), None)
        attributes = descriptor.__get__(value) if descriptor is not None else None
        slots = dict(_slots(value))
        return {**attributes, **slots} if type(attributes) is dict else slots or None


def _has_hidden(kind: type) -> bool:
    """Whether objects of a class have more than attributes: what a class in C keeps for them."""
    bases = (base for base in MRO_OF(kind) if base not in (object, Generic))
    made_in_python = _HEAPTYPE | _IMMUTABLETYPE
    return any(_FLAGS_OF(base) & made_in_python != _HEAPTYPE for base in bases)


def _is_number(numpy: Any, value: Any) -> bool:
    """Whether it is a number, a date or a text of NumPy's own types."""
    own = _MODULE_OF(type(value)) == "numpy" and safe_repr.inherits(value, numpy.generic)
    return own and not safe_repr.inherits(value, numpy.void)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes in its `__slots__`."""
    for base in MRO_OF(type(value)):
        for name, descriptor in _NAMES_OF(base).items():
            if type(descriptor) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it was not set
                    yield name, descriptor.__get__(value)


def _content(value: Any) -> Any:
    """The content of an instance of a subclass of one of Python's own types; None for any other."""
    for base, of in _CONTENT:
        if safe_repr.inherits(value, base):
            return of(value)
    return None


_CONTENT: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (dict, lambda value: dict(dict.items(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (collections.deque, lambda value: list(collections.deque.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (BaseException, lambda value: vars(BaseException)["args"].__get__(value)),
)


def _is_plain(chunk: list[Any]) -> bool:
    """True if `marshal` may write it at once: texts, numbers, short lists of them."""
    level, room = chunk, _MOST_AT_ONCE
    for _ in range(_DEEPEST_AT_ONCE):
        if not set(map(type, level)) <= _PLAIN:
            return False
        sized = [item for item in level if type(item) in _SIZED]
        room -= sum(map(len, sized))
        if room < 0 or not sized:
            return room >= 0
        lists = (item for item in sized if type(item) in _LISTS)
        level = list(itertools.chain.from_iterable(lists))
    return False


def _written(value: Any) -> str:
    """A class by its name, whatever its metaclass is."""
    return str(NAME_OF(value)) if safe_repr.inherits(value, type) else safe_repr.of(value)


def _encoded(value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if type(value) is str else value
