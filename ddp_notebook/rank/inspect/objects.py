"""The objects of a class that this process has, found while other threads run on.

A list of all objects that other threads can run beside is a defect of its own: it holds what they
build. `tuple(x for x in y)` then raises a SystemError in the user's code, as its tuple has one
reference more than Python allows there.
"""

from __future__ import annotations

import gc
from itertools import chain, compress, repeat, starmap
from typing import Any


def objects_of(*kinds: type) -> list[Any]:
    """All objects of these classes, and of classes made from them, that Python collects.

    Those that the fork server has frozen are not among them: Python lists none of these.

    Runs no code of theirs. `kinds` must have no metaclass in Python.
    """
    found: list[Any] = []
    collects = gc.isenabled()
    gc.disable()  # a collection would put objects into another generation meanwhile
    try:
        for generation in range(3):
            # Threads change between bytecodes, so both lists must come and go within the one call
            # of `list`: all that it calls is C. The second list is the first one and a few more,
            # which must be used up as well: it contains what refers to it.
            objects, again = (
                chain.from_iterable(starmap(gc.get_objects, ((generation,),))) for _ in range(2)
            )
            wanted = map(issubclass, map(type, again), repeat(kinds))
            found += list(chain(compress(objects, wanted), compress(again, repeat(False))))
    finally:
        if collects:
            gc.enable()
    return found
