"""Values of the model as no healthy rank would send them: mutated at random, deep inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from random import Random
from typing import Any, TypeVar

from ddp_notebook.model import Collective

Value = TypeVar("Value")

_SURE = (Collective, "rank")
_NUMBERS = (-2, -1, 0, 1, 2, 3, 7, 29500, 1 << 40)
_TEXTS = (
    "",
    "default",
    "collective",
    "store",
    "rendezvous",
    "process-group",
    "key",
    "ddp",
    "all_reduce",
    "barrier",
    "send",
    "recv",
    "127.0.0.1:29500",
    "rank 9-3, ranks 2: 99999999999999",
    "ranks , 99: text",
    "Mismatch",
    "KeyboardInterrupt",
    "RuntimeError",
    "Connection closed by peer",
    "EADDRINUSE address already in use",
    "params[3] in this process with sizes [] appears not to match sizes of the same param",
    "not a number",
    "\n\n",
    "ünï\x1b[31m",
    "train.py",
    "cell 3",
    "sleeping",
    "open",
    "refused",
)


def mutated(value: Value, random: Random, times: int = 3) -> Value:
    """`value` with some things in it replaced, left out, doubled or in another order."""
    for _ in range(times):
        value = _mutated(value, random, "")
    return value


def _mutated(value: Any, random: Random, kind: str) -> Any:
    if kind.endswith("| None") and random.random() < 0.15:
        return None
    if isinstance(value, Enum):
        return random.choice(list(type(value)))
    if dataclasses.is_dataclass(value):
        # Whose a record is says the file that it is read from.
        fields = [f for f in dataclasses.fields(value) if (type(value), f.name) != _SURE]
        field = random.choice(fields)
        own = _mutated(getattr(value, field.name), random, str(field.type))
        return dataclasses.replace(value, **{field.name: own})  # type: ignore[type-var]
    if isinstance(value, tuple):
        return _of_many(value, random, kind.removeprefix("tuple[").removesuffix(", ...]"))
    if isinstance(value, Mapping):
        key = random.choice(list(value)) if value else None
        if key is None or random.random() < 0.2:
            return {each: own for each, own in value.items() if each != key}
        return {**value, key: _mutated(value[key], random, "")}
    return _plain(value, random, kind)


def _of_many(value: tuple[Any, ...], random: Random, kind: str) -> tuple[Any, ...]:
    if not value:
        return value
    at = random.randrange(len(value))
    before, own, after = value[:at], value[at], value[at + 1 :]
    match random.randrange(6):
        case 0:
            return before + after
        case 1:
            return (*before, own, own, *after)
        case 2:
            return tuple(random.sample(value, len(value)))
        case _:
            return (*before, _mutated(own, random, kind), *after)


def _plain(value: Any, random: Random, kind: str) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return random.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
    if isinstance(value, int) or (value is None and kind.startswith("int")):
        return random.choice(_NUMBERS)
    return random.choice(_TEXTS) if isinstance(value, str) else value
