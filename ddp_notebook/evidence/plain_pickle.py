"""Pickles of plain values, read without running what they name.

Python's own reader runs whatever a pickle asks for, and reserves the memory that it asks for. This
one knows the opcodes of dicts, lists, texts and numbers, and refuses all others.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, cast

from ddp_notebook.model import codec

MOST_VALUES = 4_000_000
"""Opcodes of one file; a dump of 2000 collectives with stacks has about 200,000."""


class NotPlain(ValueError):
    """Not a pickle of plain values alone; the message says what is in it."""


def loads(data: bytes) -> Any:
    """The value in a pickle, with texts that can be shown. Raises NotPlain."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            name, argument = opcode.name, cast(Any, argument)
            if name == "STOP":
                return stack.pop()
            if count > MOST_VALUES:
                raise NotPlain(f"it has more than {MOST_VALUES:,} values")
            if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            elif name in _LITERALS:
                stack.append(codec.readable(argument))
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument)])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[int(argument)] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in _BUILD:
                _BUILD[name](stack)
            elif name not in ("PROTO", "FRAME"):
                raise NotPlain(f"it holds more than plain values ({name})")
    except LookupError:  # its text is a number
        raise NotPlain("it is no pickle, or not a whole one") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NotPlain(str(error) or type(error).__name__) from None
    raise NotPlain("it ends too early")


class _Mark:
    """Marks where the items of the next list, dict or tuple begin."""


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": _Mark,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_LITERALS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
    ]
)


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while not isinstance(stack[at], _Mark):
        at -= 1
        if at < 0:
            raise NotPlain("a list without a beginning")
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _extend(stack: list[Any]) -> None:
    values = _since_mark(stack)
    target = stack[-1]
    if not isinstance(target, list):
        raise NotPlain("no list to append to")
    target.extend(values)


def _append(stack: list[Any]) -> None:
    value = stack.pop()
    if not isinstance(stack[-1], list):
        raise NotPlain("no list to append to")
    stack[-1].append(value)


def _set_items(stack: list[Any]) -> None:
    _set(stack, _since_mark(stack))


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    _set(stack, [key, value])


def _set(stack: list[Any], values: list[Any]) -> None:
    target = stack[-1]
    keys = values[::2]
    # A tuple as a key could be of tuples without end, and hashing it would take as long.
    if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in keys):
        raise NotPlain("no dict of texts and numbers")
    target.update(zip(keys, values[1::2], strict=True))


def _tuple_of(count: int) -> Callable[[list[Any]], None]:
    def build(stack: list[Any]) -> None:
        values = tuple(stack[-count:])
        if len(values) < count:
            raise NotPlain("a tuple without its parts")
        del stack[-count:]
        stack.append(values)

    return build


_BUILD: dict[str, Callable[[list[Any]], None]] = {
    "APPENDS": _extend,
    "APPEND": _append,
    "SETITEMS": _set_items,
    "SETITEM": _set_item,
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
}
