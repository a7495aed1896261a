"""Checks of environment variables: left over, wrong, or known to bite."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddp_notebook.model.doctor import Check

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_BESIDE = (
    *("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_NUMBERS = ("MASTER_PORT", "RANK", "LOCAL_RANK", *_COUNTS)
_PAIRS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def check_rendezvous(environment: Mapping[str, str]) -> Check:
    """The variables of a rendezvous: not set here, before ranks are started.

    `%ddp_init` gives its ranks their own. But a script that is started here takes these:
    a failure when no group can be built with them.
    """
    name = "rendezvous variables"
    left = [each for each in (*RENDEZVOUS, *_BESIDE) if each in environment]
    if not left:
        return Check.ok(name, "none is set")
    wrong = list(_wrong(environment))
    if wrong:
        found = f"{'; '.join(wrong)}. No script started here can build a group with that"
        return Check.failure(name, found, _removal(left))
    shown = " ".join(f"{each}={environment[each]}" for each in left)
    whose = "of the torchrun job around us" if "TORCHELASTIC_RUN_ID" in environment else "left over"
    return Check.warning(
        name,
        f"{whose}: {shown}. %ddp_init gives its ranks their own; a script started here takes these",
        _removal(left),
    )


def port_of(environment: Mapping[str, str]) -> int:
    """MASTER_PORT as a port; 0 when it is not set or is none."""
    text = environment.get("MASTER_PORT", "").strip()
    return int(text) if re.fullmatch(r"\d{1,5}", text) and int(text) <= 65535 else 0


def _wrong(environment: Mapping[str, str]) -> Iterator[str]:
    """What cannot work, one clause each."""
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
            yield f"{name}=0 is a group of nobody"
    for rank, size in _PAIRS:
        if 0 < numbers.get(size, 0) <= numbers.get(rank, 0):
            last = numbers[size] - 1
            yield f"{rank}={numbers[rank]} with {size}={numbers[size]}: ranks are 0 to {last}"


def _removal(names: Sequence[str]) -> str:
    """How to be rid of variables, in a shell and in a notebook."""
    others = ", and likewise the others" if len(names) > 1 else ""
    return (
        f"Before Jupyter starts: unset {' '.join(names)}. "
        f'In the notebook: import os; os.environ.pop("{names[0]}"){others}'
    )


# --------------------------------------------------------------------------- known to bite


class _Bite(NamedTuple):
    """A variable, the values that bite (a predicate), what then happens, what to do."""

    name: str
    bites: Callable[[str], bool]
    happens: str
    remedy: str = ""


def _set(value: str) -> bool:
    return value not in ("", "0")


def _detail(value: str) -> bool:
    return value.strip().upper() == "DETAIL"


def _binds(value: str) -> bool:
    return value.strip().lower() not in ("", "false", "disabled", "none", "0")


def _renamed(name: str) -> _Bite:
    return _Bite(
        name,
        lambda _: True,
        f"the old name of TORCH_{name}, which torch complains about and will cease to read",
        f"Set TORCH_{name} instead and unset {name}.",
    )


def _pinned(name: str) -> _Bite:
    return _Bite(
        name,
        _binds,
        "every rank binds its threads to the same cores, and the others stay idle",
        f"Unset {name}.",
    )


_BITES = (
    _Bite(
        "TORCH_DISTRIBUTED_DEBUG",
        _detail,
        "DDP on gloo dies of it (segmentation fault), and small collectives take several "
        "times as long",
        "Set it to INFO or unset it.",
    ),
    _Bite(
        "TORCHELASTIC_USE_AGENT_STORE",
        lambda value: value == "True",  # torch compares with this very text
        "left over from a torchrun job: rank 0 of a script started here opens no store, and "
        "all ranks wait for one",
        "Unset it. %ddp_init sets it for its ranks, whose store the session keeps.",
    ),
    _Bite(
        "CUDA_LAUNCH_BLOCKING",
        _set,
        "every kernel is waited for: communication cannot overlap with computing, and times "
        "say nothing",
        "Unset it unless you look for the line of a CUDA error.",
    ),
    _renamed("NCCL_ASYNC_ERROR_HANDLING"),
    _renamed("NCCL_BLOCKING_WAIT"),
    _renamed("NCCL_DESYNC_DEBUG"),
    _pinned("OMP_PROC_BIND"),
    _pinned("GOMP_CPU_AFFINITY"),
    _pinned("KMP_AFFINITY"),
)


def check_bites(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """A warning for each variable that is known to bite; a single ok when there is none."""
    found = tuple(
        Check.warning(bite.name, f"{environment[bite.name]}: {bite.happens}", bite.remedy)
        for bite in _BITES
        if bite.name in environment and bite.bites(environment[bite.name])
    )
    return found or (Check.ok("other variables", "none that is known to bite"),)
