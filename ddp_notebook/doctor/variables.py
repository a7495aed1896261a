"""Checks of environment variables: left over, wrong, or known to make trouble."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddp_notebook.model.doctor import Check

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_MORE_OF_TORCHRUN = (
    *("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_NUMBERS = ("MASTER_PORT", "RANK", "LOCAL_RANK", *_COUNTS)
_PAIRS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def check_rendezvous(environment: Mapping[str, str]) -> Check:
    """The rendezvous variables are not set in the environment that ranks are started from.

    `%ddp_init` sets them for its ranks, but a script that is started here reads these. It is a
    failure when no process group can be built with them.
    """
    name = "rendezvous variables"
    left = [v for v in (*RENDEZVOUS, *_MORE_OF_TORCHRUN) if v in environment]
    if not left:
        return Check.ok(name, "none is set")
    wrong = list(_mistakes(environment))
    if wrong:
        found = f"{'; '.join(wrong)}. No script started here can build a process group"
        return Check.failure(name, found, _removal(left))
    shown = " ".join(f"{name}={environment[name]}" for name in left)
    in_job = "TORCHELASTIC_RUN_ID" in environment
    whose = "set by torchrun, which started this process" if in_job else "left over"
    return Check.warning(
        name,
        f"{whose}: {shown}. %ddp_init sets them anew for its ranks; a script started here reads "
        "these",
        _removal(left),
    )


def port_of(environment: Mapping[str, str]) -> int:
    """MASTER_PORT as a number; 0 when it is not set or not a port."""
    text = environment.get("MASTER_PORT", "").strip()
    return int(text) if re.fullmatch(r"\d{1,5}", text) and int(text) <= 65535 else 0


def _mistakes(environment: Mapping[str, str]) -> Iterator[str]:
    """What cannot work, a clause for each mistake."""
    if not environment.get("MASTER_ADDR", "here").strip():
        yield "MASTER_ADDR is empty"
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = environment.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\s*\d+\s*", text):
            yield f"{name}={text} is not a number of 0 or more"
        else:
            numbers[name] = int(text)
    if not 1 <= numbers.get("MASTER_PORT", 1) <= 65535:
        yield f"MASTER_PORT={numbers['MASTER_PORT']} is not a port (1 to 65535)"
    for name in _COUNTS:
        if numbers.get(name) == 0:
            yield f"{name} must be at least 1, not 0"
    for rank, size in _PAIRS:
        if 0 < numbers.get(size, 0) <= numbers.get(rank, 0):
            last = numbers[size] - 1
            yield f"{rank}={numbers[rank]} with {size}={numbers[size]}: ranks are 0 to {last}"


def _removal(names: Sequence[str]) -> str:
    """How to unset variables, in a shell and in a notebook."""
    others = ", and likewise the others" if len(names) > 1 else ""
    return (
        f"Before Jupyter starts: unset {' '.join(names)}. "
        f'In the notebook: import os; os.environ.pop("{names[0]}"){others}'
    )


# --------------------------------------------------------------------------- known trouble


class _Trouble(NamedTuple):
    """A variable that makes trouble: with which values, what happens then, what to do."""

    name: str
    with_value: Callable[[str], bool]
    effect: str
    remedy: str


def _set(value: str) -> bool:
    return value not in ("", "0")


def _detail(value: str) -> bool:
    return value.strip().upper() == "DETAIL"


def _binds(value: str) -> bool:
    return value.strip().lower() not in ("", "false", "disabled", "none", "0")


def _renamed(name: str) -> _Trouble:
    return _Trouble(
        name,
        lambda _: True,
        f"the old name of TORCH_{name}: torch warns of it and will stop reading it",
        f"Set TORCH_{name} instead and unset {name}.",
    )


def _pinned(name: str) -> _Trouble:
    return _Trouble(
        name,
        _binds,
        "every rank binds its threads to the same cores, and the other cores stay idle",
        f"Unset {name}.",
    )


_TROUBLES = (
    _Trouble(
        "TORCH_DISTRIBUTED_DEBUG",
        _detail,
        "DDP on gloo crashes with it (segmentation fault), and small collectives take several "
        "times as long",
        "Set it to INFO or unset it.",
    ),
    _Trouble(
        "TORCHELASTIC_USE_AGENT_STORE",
        lambda value: value == "True",  # torch compares with exactly this text
        "left over from a torchrun job: rank 0 of a script started here opens no store, and "
        "all ranks wait for one",
        "Unset it. %ddp_init sets it for its ranks, because the session hosts their store.",
    ),
    _Trouble(
        "CUDA_LAUNCH_BLOCKING",
        _set,
        "every CUDA kernel runs synchronously: communication cannot overlap with computation, "
        "and timings mean nothing",
        "Unset it unless you are looking for the line of a CUDA error.",
    ),
    _renamed("NCCL_ASYNC_ERROR_HANDLING"),
    _renamed("NCCL_BLOCKING_WAIT"),
    _renamed("NCCL_DESYNC_DEBUG"),
    _pinned("OMP_PROC_BIND"),
    _pinned("GOMP_CPU_AFFINITY"),
    _pinned("KMP_AFFINITY"),
)


def check_known_trouble(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """A warning for each variable that is known to make trouble; a single ok if there is none."""
    warnings = tuple(
        Check.warning(name, f"{environment[name]}: {effect}", remedy)
        for name, with_value, effect, remedy in _TROUBLES
        if name in environment and with_value(environment[name])
    )
    return warnings or (Check.ok("other variables", "none that is known to make trouble"),)
