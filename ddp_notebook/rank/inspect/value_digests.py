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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.safe_repr import MRO_OF, NAME_OF, TENSORS
from ddp_notebook.rank.inspect.tensor_values import array_bytes, bytes_of

_CHUNK = 512
_MOST_SORTED = 100_000
"""Keys of a dict or items of a set: no clock is read while they are sorted."""
_SCALARS = frozenset((int, float, complex, bool, type(None), type(Ellipsis)))
_TEXTS = frozenset((str, bytes, bytearray))
_LISTS = (list, tuple)
_SIZED = frozenset((str, bytes, *_LISTS))
_SETS = (set, frozenset)
_MODULE_OF = type.__dict__["__module__"].__get__
_NAMES_OF = type.__dict__["__dict__"].__get__
_FLAGS_OF = type.__dict__["__flags__"].__get__
_NOT_LOOKED_INTO = (sys.stdlib_module_names | {"torch", "numpy", "ddp_notebook"}) - {
    "argparse",
    "types",
    "enum",
    "fractions",
    "uuid",
}
"""Packages whose objects are compared by their class alone: much in them, such as locks, is each
rank's own."""


class _TimeIsUp(Exception):
    """The time was up before a value was read to its end."""


class Digester:
    """Makes digests until its time is up. Without `objects`, of Python's own types only."""

    def __init__(self, *, objects: bool, seconds: float = 0.0) -> None:
        self._objects = objects
        self.opaque = False
        """True when a part is compared by its class alone: then equal digests prove nothing."""
        # CPU time for all digests of one answer; with `objects` one value alone is asked for.
        self._until_s = time.thread_time() + (seconds or (0.035 if objects else 0.02))

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
            return zlib.crc32(_marshalled(value))
        self._look_at_clock()
        # The class counts: `[1]` and `(1,)` are not equal.
        crc = zlib.crc32(safe_repr.class_name(value).encode())
        if kind in _TEXTS:
            parts = (value[at : at + 2**20] for at in range(0, len(value), 2**20))
            encoded = (p.encode("utf-8", "surrogatepass") if kind is str else p for p in parts)
            return self._blocks(encoded, crc)
        if depth >= 12:
            self.opaque = True
            return crc
        if kind in _LISTS:
            return self._items(value, crc, depth)
        if kind is dict:
            return self._dict(value, crc, depth)
        if kind in _SETS:
            return self._unordered(list(value), crc, depth)
        if kind in TENSORS:
            return self._values(value, bytes_of(value), value.numel(), crc)
        if safe_repr.is_array(value):
            return self._values(value, array_bytes(value), value.size, crc)
        numpy = sys.modules.get("numpy")
        if numpy is not None and _MODULE_OF(kind) == "numpy":
            # A number, a date or a text of NumPy's own types; a record may have objects in it.
            inherits = safe_repr.inherits
            if inherits(value, numpy.generic) and not inherits(value, numpy.void):
                return zlib.crc32(numpy.generic.tobytes(value), crc)
        if kind is types.FunctionType:
            # By where it is defined. What it closes over is not looked at, nor which lambda of a
            # line it is.
            code = value.__code__
            self.opaque |= bool(value.__closure__) or code.co_name == "<lambda>"
            place = f"{code.co_qualname} {code.co_filename} {code.co_firstlineno}"
            return zlib.crc32(place.encode("utf-8", "surrogatepass"), crc)
        if safe_repr.inherits(value, type):
            return zlib.crc32(str(NAME_OF(value)).encode(), crc)  # whatever its metaclass is
        if safe_repr.is_whole(value):
            return zlib.crc32(safe_repr.of(value).encode(), crc)
        return self._object(value, crc, depth)

    def _items(self, items: Sequence[Any], crc: int, depth: int) -> int:
        """The digest of the items of a list or tuple, in order."""
        for begin in range(0, len(items), _CHUNK):
            chunk = list(items[begin : begin + _CHUNK])
            if _is_plain(chunk):
                crc = zlib.crc32(_marshalled(chunk), crc)
                self._look_at_clock()
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
        # A sum does not depend on the order, in which sets and dicts differ between processes.
        total = sum(self._crc(item, depth + 1) for item in items)
        return zlib.crc32(total.to_bytes(8, "little"), crc)

    def _values(self, value: Any, blocks: Iterable[Any], size: int, crc: int) -> int:
        """The digest of a tensor or an array with `size` values, which are in `blocks`."""
        crc = zlib.crc32(safe_repr.of(value).encode(), crc)
        whole = self._blocks(blocks, crc)
        self.opaque |= bool(whole == crc and size)
        return whole

    def _object(self, value: Any, crc: int, depth: int) -> int:
        """The digest of an object: its content as one of Python's own types, and its attributes."""
        kind, own = type(value), None
        if str(_MODULE_OF(kind)).partition(".")[0] not in _NOT_LOOKED_INTO:
            own = _attributes(value)
        for base, content_of in _CONTENT:
            if safe_repr.inherits(value, base):
                content = self._crc(content_of(value), depth + 1)
                crc = zlib.crc32(content.to_bytes(4, "little"), crc)
                break
        else:
            # A class that is made in C may keep more for its objects than attributes. The flags
            # are those of CPython's `object.h`: HEAPTYPE, and not IMMUTABLETYPE.
            bases = (base for base in MRO_OF(kind) if base not in (object, Generic))
            if own is None or any(_FLAGS_OF(b) & (1 << 9 | 1 << 8) != 1 << 9 for b in bases):
                self.opaque = True
                crc = zlib.crc32(safe_repr.of(value).encode(), crc)
        return self._dict(own, crc, depth) if own else crc

    def _blocks(self, blocks: Iterable[Any], crc: int) -> int:
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self._look_at_clock()
        return crc

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._until_s:
            raise _TimeIsUp


def _marshalled(value: Any) -> bytes:
    # The last version that always writes equal values as equal bytes: later ones refer back to
    # what they have written before, if it is the same object.
    return marshal.dumps(value, 2)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return its `__dict__` and its `__slots__`, read past its class; None without either."""
    found: dict[str, Any] = {}
    has_some = False
    for base in reversed(MRO_OF(type(value))):
        for name, descriptor in _NAMES_OF(base).items():
            if type(descriptor) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it was not set
                    found[name] = descriptor.__get__(value)
                    has_some = True
            elif name == "__dict__" and type(descriptor) is types.GetSetDescriptorType:
                own = descriptor.__get__(value)
                if type(own) is dict:
                    found.update(own)
                    has_some = True
    return found if has_some else None


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
"""The content of instances of subclasses of Python's own types."""


def _is_plain(chunk: list[Any]) -> bool:
    """Return whether `marshal` may write it at once: texts, numbers, short lists of them."""
    level, room = chunk, 200_000  # in items and characters
    for _ in range(5):
        if not set(map(type, level)) <= _SCALARS | _SIZED:
            return False
        sized = [item for item in level if type(item) in _SIZED]
        room -= sum(map(len, sized))
        if room < 0 or not sized:
            return room >= 0
        lists = (item for item in sized if type(item) in _LISTS)
        level = list(itertools.chain.from_iterable(lists))
    return False
