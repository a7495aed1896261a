"""Values of JSON as nobody would send them, made from good ones by a few changes.

`DDP_NOTEBOOK_MUTATIONS` says how often each kind of file or message is tried, and then at random;
else the same few are tried each time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_ASKED = os.environ.get("DDP_NOTEBOOK_MUTATIONS")
TRIES = int(_ASKED or "40")
often = settings(
    max_examples=TRIES,
    derandomize=not _ASKED,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
within = pytest.mark.timeout(180 + TRIES)

HOSTILE: list[Any] = [
    *(None, True, -7, 0, 99, 1 << 62, 1 << 70, 1.5, math.inf, -math.inf, math.nan, 1e300, "", "x"),
    *(
        "\x1b]0;title\x07\x1b[2J",
        "half \ud800",
        "\0",
        "../../etc/passwd",
        "a" * 5000,
        "٣",
        "1" * 30,
    ),
    *("-" * 30_000 + "1", "not " * 5000, "a" + ".b" * 5000, "1" + "+1" * 5000, "(" * 500),
    *("if x:\n    pass\n" + "elif x:\n    pass\n" * 2000, "lambda: " * 500, "'%99999999d' % rank"),
    *([], {}, [1], [None], {"a": 1}, {"0": [[]]}, [[[[]]]]),
    *(
        -0.0,
        10**400,
        -(10**4000),
        1 << 31,
        1 << 63,
        "99999.0.0",
        "\u202e",
        "<script>",
        "&lt;",
        "%s",
    ),
]
DEEP = "deep below"
"""Stands for lists in lists, ten thousand deep, which only a text can hold."""


def places(wire: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something in a JSON value."""
    items: Any = wire.items() if isinstance(wire, dict) else ()
    items = enumerate(wire) if isinstance(wire, list) else items
    for key, each in items:
        yield (*at, key)
        yield from places(each, (*at, key))


def change(wire: Any, place: tuple[Any, ...], how: str, value: Any) -> None:
    """Change what is at `place`, if that is still there."""
    holder = wire
    try:
        for key in place[:-1]:
            holder = holder[key]
        there = holder[place[-1]]
    except (LookupError, TypeError):
        return
    if isinstance(holder, str):
        return
    if how == "drop":
        del holder[place[-1]]
    elif how == "double" and isinstance(holder, list):
        holder.insert(place[-1], copy.deepcopy(there))
    elif how == "more" and isinstance(there, list):
        there.extend(copy.deepcopy(there))
    elif how == "more" and isinstance(there, dict):
        there[str(value)[:99]] = copy.deepcopy(next(iter(there.values()), value))
    elif how == "swap" and isinstance(holder, list):
        holder[place[-1]], holder[-1] = holder[-1], there
    elif how == "text":
        holder[place[-1]] = str(there)[:99]
    elif how == "deep":
        holder[place[-1]] = DEEP
    elif how == "add" and type(there) in (int, float):
        with contextlib.suppress(OverflowError):  # an integer that no float can hold
            holder[place[-1]] = there + (value if type(value) in (int, float) else 1)
    else:
        holder[place[-1]] = copy.deepcopy(value)


def changes(wire: Any) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Up to three changes of a JSON value."""
    one = st.tuples(
        st.sampled_from(list(places(wire))),
        st.sampled_from(
            ["set", "set", "set", "drop", "double", "more", "add", "swap", "text", "deep"]
        ),
        st.sampled_from(HOSTILE),
    )
    return st.lists(one, min_size=1, max_size=3)


def changed(wire: Any, made: list[tuple[Any, ...]]) -> Any:
    wire = copy.deepcopy(wire)
    for place, how, value in made:
        change(wire, place, how, value)
    return wire


def as_json(wire: Any) -> bytes:
    """Also what JSON does not have, as a careless writer would, and keys that come twice."""
    text = json.dumps(wire).replace("Infinity", "1e400")
    deep = json.dumps(DEEP)
    if deep in text:
        text = text.replace(deep, "[" * 10_000 + "]" * 10_000).replace("{", '{"rank": [], ', 1)
    return text.encode()


def sendable(value: Any) -> None:
    """A page or a terminal can take it."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
