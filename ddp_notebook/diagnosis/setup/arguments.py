"""Rules about init_process_group's arguments: invalid, different, or used twice."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, vote
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.patch import without_setting
from ddp_notebook.diagnosis.training.construction import compare
from ddp_notebook.model import (
    PRIVATE_STORE,
    Activity,
    Case,
    Finding,
    InitArguments,
    RankReport,
    by_value,
    name_ranks,
)


def invalid_values(context: Context) -> Iterator[Finding]:
    """A value that cannot work anywhere."""
    if _wrong_size(context.case) is None:
        beyond = list(_beyond_the_last(context.case))
        known = {rank for finding in beyond for rank in finding.ranks}
        for finding in torch_errors.of_errors(context.case, invalid=True):
            if not known.issuperset(finding.ranks):
                yield finding
        yield from beyond
        yield from _never_met_by_others(context.case)


def _never_met_by_others(case: Case) -> Iterator[Finding]:
    """Ranks that wait at a port that no one else knows, or for keys in a store of their own."""
    waiting = [e for e in case.callers if e.activity is Activity.WAITING]
    zero = tuple(e.rank for e in waiting if e.arguments.master_port == 0)
    if zero:
        yield catalogue.finding(
            "env-invalid.port-zero",
            zero,
            waiting=case.waiting,
            evidence=tuple(f"rank {rank}: MASTER_PORT=0" for rank in zero),
        )
    private = tuple(e.rank for e in waiting if e.arguments.store == PRIVATE_STORE)
    if len(private) > 1:
        yield catalogue.finding(
            "env-invalid.private-store",
            private,
            waiting=case.waiting,
            evidence=tuple(f"rank {rank}: store=HashStore()" for rank in private),
        )


def _beyond_the_last(case: Case) -> Iterator[Finding]:
    """Ranks whose RANK is not below WORLD_SIZE: torch refuses it only at the end, if at all."""
    values = {e.rank: e.arguments for e in case.callers}
    wrong = {
        rank: f"RANK={arguments.rank}, WORLD_SIZE={arguments.world_size}"
        for rank, arguments in values.items()
        if arguments.rank is not None
        and arguments.world_size
        and arguments.rank >= arguments.world_size
    }
    if wrong:
        shift = _shift(values, case)
        yield catalogue.finding(
            "env-invalid.ranks-shifted" if shift else "env-invalid.beyond-the-last",
            tuple(values) if shift else tuple(sorted(wrong)),
            waiting=case.waiting,
            evidence=tuple(
                f"the process launched as rank {rank} has RANK={arguments.rank}, "
                f"WORLD_SIZE={arguments.world_size}"
                for rank, arguments in values.items()
            ),
            values=next(iter(wrong.values())) if len(set(wrong.values())) == 1 else "",
            shift=shift,
        )


def _shift(values: Mapping[int, InitArguments], case: Case) -> int:
    """By how much the RANK of every process is above the one that it was launched as; else 0."""
    own = {report.rank: number for number, report in enumerate(case.ranks)}
    shifts = {(arguments.rank or 0) - own[rank] for rank, arguments in values.items()}
    return shifts.pop() if len(shifts) == 1 and len(values) == case.world_size else 0


def _wrong_size(case: Case) -> int | None:
    """The WORLD_SIZE that every rank has, if it does not fit the number of processes.

    A group of some of the processes is right: then no more ranks call than it takes.
    """
    sizes = {e.arguments.world_size for e in case.callers}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or size == case.world_size:
        return None
    fits = len(case.callers) <= size and all((e.arguments.rank or 0) < size for e in case.callers)
    return size if size > case.world_size or not fits else None


def duplicate_ranks(context: Context) -> Iterator[Finding]:
    """Two processes have the same RANK."""
    case = context.case
    expected = case.told.get("WORLD_SIZE", "")
    # A run of some of the session's ranks counts them from 0.
    own = {report.rank: number for number, report in enumerate(case.ranks)}
    for reports in context.meetings:
        claimed = {
            e.rank: e.arguments.rank
            for e in reports
            if e.arguments.rank is not None
            and (e.arguments.world_size is None or expected in ("", str(e.arguments.world_size)))
        }
        twice = sorted((claim, ranks) for ranks, claim in by_value(claimed) if len(ranks) > 1)
        wrong = {r: own[r] for claim, ranks in twice for r in ranks if own[r] != claim}
        if not wrong:
            continue
        missing = tuple(sorted(set(range(case.world_size)) - set(claimed.values())))
        yield catalogue.finding(
            "duplicate-rank.same-rank",
            tuple(sorted(wrong)),
            waiting=case.waiting,
            evidence=tuple(
                f"the process launched as rank {rank} has RANK={claim}"
                for claim, ranks in twice
                for rank in ranks
            ),
            twice=tuple(
                f"{name_ranks(ranks)} {'both' if len(ranks) == 2 else 'all'} have RANK={claim}"
                for claim, ranks in twice
            ),
            missing=missing if len(reports) == case.world_size else (),
            right=tuple(f"RANK={number} on rank {rank}" for rank, number in sorted(wrong.items())),
        )


def differing_values(context: Context) -> Iterator[Finding]:
    """MASTER_ADDR, MASTER_PORT, WORLD_SIZE, the backend or the method differ between ranks."""
    case = context.case
    for reports in context.meetings:
        for name in _VALUES:
            values = _values_of(name, reports, case.told.get(name, ""))
            different = len(set(values.values()))
            if name == "the file" and different == len(reports) > 2:
                # None is right, all make the same mistake.
                yield catalogue.finding(
                    "env-mismatch.own-file",
                    tuple(sorted(values)),
                    waiting=case.waiting,
                    evidence=by_ranks(values),
                )
            elif different > 1:
                yield _differing(name, values, context, reports)


def _differing(
    name: str, values: Mapping[int, str], context: Context, reports: Iterable[RankReport]
) -> Finding:
    case = context.case
    # What the launcher gave is right, however few still have it: another value was set by the code.
    # Else most ranks are; and in a tie who hosts the store, since the others must come to where
    # that is.
    expected = case.told.get(name, "")
    votes = vote(values, expected, case.store_host)
    right, culprits = votes.value, votes.minority
    who: Sequence[object] = votes.majority
    if name.startswith("MASTER") and case.store_host is None and expected not in ("", right):
        # The store is where it is, however many ranks agree on another place.
        right, culprits, who = expected, tuple(sorted(values)), ("the session's store",)
    wrong = {values[rank] for rank in culprits}
    shown = f"`{name}`" if name.isupper() else name
    facts: dict[str, Any] = {"different": shown}
    if len(wrong) == 1:
        facts = {"setting": _setting(name, *wrong)}
    if right == expected:
        facts["launched"] = shown
    elif name == "MASTER_PORT":  # chosen for this start, it is another one at the next
        facts["for_all"] = shown
    else:
        facts["correct"] = _setting(name, right)
    return catalogue.finding(
        "env-mismatch.differs",
        culprits,
        waiting=case.waiting,
        evidence=by_ranks({r: f"{name}={value}" for r, value in sorted(values.items())}),
        majority=who,
        right=right,
        patch=_left_as_launched(context, name, reports),
        **facts,
    )


def _left_as_launched(context: Context, name: str, reports: Iterable[RankReport]) -> str:
    """Return the change by which all ranks have what the launcher gave them, if that is certain."""
    texts = [text for text in context.sources.texts.values() if name in text]
    by_environment = all(report.arguments.method == "env" for report in reports)
    given = context.case.told.get(name) and by_environment and len(texts) == 1
    return without_setting(texts[0], name) if given else ""


def _setting(name: str, value: str) -> str:
    return f"`{name}={value}`" if name.isupper() else f"{name} `{value}`"


def wrong_world_size(context: Context) -> Iterator[Finding]:
    """All ranks expect another number of ranks than there are processes."""
    case, size = context.case, _wrong_size(context.case)
    if size is None:
        return
    yield catalogue.finding(
        "world-size-mismatch.on-all-ranks",
        tuple(report.rank for report in case.callers),
        waiting=case.waiting,
        evidence=tuple(f"rank {report.rank}: world_size={size}" for report in case.callers),
        size=size,
        processes=case.world_size,
    )


def other_versions(context: Context) -> Iterator[Finding]:
    """torch or Python differ between ranks."""
    case = context.case
    for name in ("torch", "python"):
        values = {
            e.rank: e.process.versions[name] for e in case.ranks if e.process.versions.get(name)
        }
        if name == "python":  # 3.12.1 and 3.12.4 work together
            values = {rank: ".".join(text.split(".")[:2]) for rank, text in values.items()}
        if len(set(values.values())) < 2:
            continue
        votes = vote(values)
        yield catalogue.finding(
            "version-mismatch.differs",
            votes.minority,
            waiting=case.waiting,
            evidence=tuple(
                f"rank {rank}: {name} {value}" for rank, value in sorted(values.items())
            ),
            name=name,
            versions=tuple(dict.fromkeys(values[rank] for rank in votes.minority)),
            majority=votes.majority,
            right=votes.value,
        )


def differing_models(context: Context) -> Iterator[Finding]:
    """The models that ranks wrap differ in number, order, shape or dtype of their tensors."""
    models = {e.rank: model for e in context.case.ranks if (model := e.parts.wrapped) is not None}
    for finding in compare(models):
        yield replace(
            finding,
            remedy=catalogue.words("param-mismatch.ddp-refused.fix"),
            waiting=context.case.waiting,
        )


# -- values that are the same under two names --------------------------------------------

_VALUES: Mapping[str, Callable[[RankReport], str]] = {
    "MASTER_ADDR": lambda report: report.arguments.master_addr,
    "MASTER_PORT": lambda report: str(report.arguments.master_port or ""),
    "WORLD_SIZE": lambda report: str(report.arguments.world_size or ""),
    "backend": lambda report: report.arguments.backend,
    "init_method": lambda report: report.arguments.method,
    "the file": lambda report: report.arguments.path,
    "the store": lambda report: report.arguments.store,
}
"""The values that must be the same on every rank."""


def _values_of(name: str, reports: Iterable[RankReport], expected: str) -> dict[int, str]:
    """Return the values of these ranks, as far as they are known.

    Names and addresses of one machine are one value, written as `expected` if that is one.
    """
    reports = tuple(reports)
    values = {report.rank: value for report in reports if (value := _VALUES[name](report))}
    if name != "MASTER_ADDR" or len(set(values.values())) < 2:
        return values
    names = [expected] * bool(expected)
    names += [host for host, _ in Counter(values.values()).most_common()]
    same: dict[str, str] = {}
    for host in names:
        if (own := _addresses_of(host, reports)) is not None:
            known = (
                other
                for other in set(same.values())
                if own & (_addresses_of(other, reports) or set())
            )
            same.setdefault(host, next(known, host))
    return {rank: same[value] for rank, value in values.items() if value in same}


def _addresses_of(name: str, reports: tuple[RankReport, ...]) -> set[str] | None:
    """The addresses of `name`, itself among them; None while no resolver has answered for it."""
    addresses = {address for e in reports for address in e.network.addresses.get(name, ())}
    try:
        addresses.add(str(ipaddress.ip_address(name)))
    except ValueError:
        if name != "localhost" and not any(name in e.network.addresses for e in reports):
            return None
    loopback = name == "localhost" or any(ipaddress.ip_address(a).is_loopback for a in addresses)
    return {*addresses, name, *(("localhost",) if loopback else ())}
