"""The objects of a class that this process has, found while other threads run on.

A list of all objects that other threads can run beside is a defect of its own: it holds what they
build. `tuple(x for x in y)` then raises a SystemError in the user's code, as its tuple has one
reference more than Python allows there.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import chain, compress, repeat, starmap
from types import FunctionType
from typing import Any

_GENERATIONS = 3
_SEPARATOR = "\0"
_frozen: list[list[FunctionType]] = []
"""The functions that the fork server had loaded, file by file: Python lists no frozen objects."""
_files: list[str] = []
"""One text: the files of these. To look at the names themselves would copy a page for most."""


def keep_functions() -> None:
    """Remember all functions: whoever calls it is about to freeze them, and has no threads."""
    if hasattr(sys, "monitoring"):
        return  # it finds code as that begins
    found: dict[str, list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType:
            found.setdefault(each.__code__.co_filename, []).append(each)
    if found:
        _frozen.extend(found.values())
        _files[:] = [_SEPARATOR.join((*_files, *found))]


def functions(in_frozen: Callable[[str], bool]) -> list[FunctionType]:
    """All functions; of the frozen ones those of the files that `in_frozen` names.

    To read the others would copy the memory that ranks share.
    """
    files = (
        number
        for files in _files
        for number, file in enumerate(files.split(_SEPARATOR))
        if in_frozen(file)
    )
    kept = (function for number in files for function in _frozen[number])
    return list({id(each): each for each in chain(kept, objects_of(FunctionType))}.values())


def objects_of(*kinds: type) -> list[Any]:
    """All objects of these classes, and of classes made from them, that Python collects.

    Those that the fork server has frozen are not among them: see `functions`.

    Runs no code of theirs. `kinds` must have no metaclass in Python.
    """
    found: list[Any] = []
    collects = gc.isenabled()
    gc.disable()  # a collection would put objects into another generation meanwhile
    try:
        for generation in range(_GENERATIONS):
            found += _in_one_call(generation, kinds)
    finally:
        if collects:
            gc.enable()
    return found


def _in_one_call(generation: int, kinds: tuple[type, ...]) -> list[Any]:
    # Threads change between bytecodes, so both lists must come and go within the one call of
    # `list`: all that it calls is C. The second list is the first one and a few more, which must
    # be used up as well: it contains what refers to it.
    objects, again = (
        chain.from_iterable(starmap(gc.get_objects, ((generation,),))) for _ in range(2)
    )
    wanted = map(issubclass, map(type, again), repeat(kinds))
    return list(chain(compress(objects, wanted), compress(again, repeat(False))))
