"""Which ranks differ from the rest, and which of two values is the right one."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ddp_notebook.model import Activity, Case, RankReport, Ranks

IN_SETUP = ("store", "rendezvous", "process-group")
"""The parts of set-up in which a rank waits for others to come."""


def call_number(evidence: RankReport) -> int:
    """Which of its calls of init_process_group a rank is at: the one it waits in, or its last."""
    waits = evidence.activity is Activity.WAITING and evidence.inside in IN_SETUP
    return (
        evidence.left + 1 if waits and evidence.entered > evidence.left else max(1, evidence.left)
    )


def meetings(case: Case) -> tuple[tuple[RankReport, ...], ...]:
    """The ranks that came, by which of their calls they are at: only those can meet."""
    numbers = sorted({call_number(e) for e in case.came})
    return tuple(tuple(e for e in case.came if call_number(e) == number) for number in numbers)


def odd_ones(values: Mapping[int, str], told: str, host: int | None) -> tuple[str, Ranks]:
    """The right value, and the ranks that have another.

    Right is what the launcher told (if any rank has that), else what more than half of the
    ranks have, else what the store's host has (rank 0 when it is not a rank).
    """
    counts = Counter(values.values())
    common, count = counts.most_common(1)[0]
    if told and told in counts:
        right = told
    elif 2 * count > len(values):
        right = common
    else:
        first = host if host in values else min(values)
        assert first is not None
        right = values[first]
    return right, tuple(rank for rank, value in sorted(values.items()) if value != right)


VALUES: dict[str, Callable[[RankReport], str]] = {
    "MASTER_ADDR": lambda e: e.arguments.master_addr,
    "MASTER_PORT": lambda e: str(e.arguments.master_port or ""),
    "WORLD_SIZE": lambda e: str(e.arguments.world_size or ""),
    "backend": lambda e: e.arguments.backend,
    "init_method": lambda e: e.arguments.method,
    "the file": lambda e: e.arguments.path,
}
"""What every rank must come with alike."""


def values_of(name: str, ranks: Iterable[RankReport], told: str) -> dict[int, str]:
    """What these ranks came with, those left out of which it is not known.

    Names and addresses of one machine are one value, written as `told` if that is one of them.
    """
    came = tuple(ranks)
    values = {e.rank: value for e in came if (value := VALUES[name](e))}
    if name != "MASTER_ADDR" or len(set(values.values())) < 2:
        return values
    names = [told] * bool(told) + [each for each, _ in Counter(values.values()).most_common()]
    same: dict[str, str] = {}
    for each in names:
        if (mine := _means(each, came)) is not None:
            known = (other for other in set(same.values()) if mine & (_means(other, came) or set()))
            same.setdefault(each, next(known, each))
    return {rank: same[value] for rank, value in values.items() if value in same}


def _means(name: str, ranks: Iterable[RankReport]) -> set[str] | None:
    """The addresses of `name`, itself among them; None while no resolver has answered for it."""
    found = {each for e in ranks for each in e.addresses.get(name, ())}
    try:
        found.add(str(ipaddress.ip_address(name)))
    except ValueError:
        if name != "localhost" and not any(name in e.addresses for e in ranks):
            return None
    loopback = name == "localhost" or any(ipaddress.ip_address(a).is_loopback for a in found)
    return {*found, name, *(("localhost",) if loopback else ())}


def assignment(name: str, value: str) -> str:
    """How a right value is given."""
    return f"{name}={value}" if name.isupper() else f"{name} {value}"
