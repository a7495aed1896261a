"""The exercises of notebook 3: twelve ways to hang at start."""

from __future__ import annotations

from typing import Any

from ddp_notebook.model import Category, Diagnosis, Ranks, name_ranks
from ddp_notebook.workshop.answers import (
    a_rank,
    diagnosis,
    one_of,
    parts,
    ranks,
    shown,
    with_passed,
)
from ddp_notebook.workshop.check import WrongAnswer, exercise

_KINDS = ("missing-rank", "duplicate-rank", "env-mismatch", "rank-died", "straggler")
_ON_ONE_MACHINE = {
    "port-held": "a port that is taken is taken on this machine",
    "address-unresolved": "this machine's resolver knows a name, or does not",
}
_AMONG_RANKS = {
    "duplicate-rank": "RANK=1 is a good value; it is wrong because another process says so too",
    "missing-rank": "a rank that will not come looks like any other before the start",
    "world-size-differs": "3 and 4 are both fine by themselves",
}


@exercise("3.1", a_rank)
def whose_key_is_named(rank: int) -> str:
    """Rank 3 is missing; ranks 1 and 2 name rank 0, which is inside the store."""
    if rank == 3:
        raise WrongAnswer(
            "rank 3 is the missing one, and that would be a good message. But where is rank 2, and "
            "whose address does it need first? That does not depend on who is missing."
        )
    if rank == 2:
        raise WrongAnswer("rank 2 has written its own key already. It waits for another one's.")
    if rank == 1:
        raise WrongAnswer(
            "rank 1 has connected this time, and has written its address. Which rank never gets as "
            "far as that?"
        )
    if rank != 0:
        raise WrongAnswer("there are four ranks, 0 to 3.")
    return (
        "right: the same innocent rank 0, whoever is missing. It is inside its store, waiting "
        "for the last one to connect, so no other rank finds its address."
    )


@exercise("3.2", with_passed(ranks(), diagnosis))
def ranks_that_stay_in_the_store(answer: tuple[Ranks, Diagnosis]) -> str:
    """The one with the wrong port, and rank 0, which waits for it inside the store."""
    prediction, found = answer
    inside = tuple(
        rank for rank, doing in (found.doing or {}).items() if doing.startswith("waiting in store")
    )
    if not inside:
        raise WrongAnswer(
            "in this diagnosis no rank waits in the store. Run the cell with %ddp_run again, and "
            "then this one."
        )
    extra = tuple(rank for rank in prediction if rank not in inside)
    if extra:
        raise WrongAnswer(
            f"{name_ranks(extra)} got further: connected to the store, with the right port, and "
            "went on. Who opens the store, and what does it wait for in there?"
        )
    missing = tuple(rank for rank in inside if rank not in prediction)
    if missing:
        raise WrongAnswer(
            "that is not all of them. One cannot find the store, and one cannot leave it. "
            "Read again what rank 0 did in the script above."
        )
    return (
        f"right: {name_ranks(inside)}. One looks at the wrong port, the other waits for it at "
        "the right one. Only one of the two has made a mistake."
    )


def _suspect(answer: Any) -> tuple[int, str, Diagnosis]:
    own, hidden = parts(answer)
    if not (isinstance(own, (tuple, list)) and len(own) == 2):
        raise WrongAnswer(
            f"expected a rank and a kind, such as (3, 'straggler'), got {shown(own)}."
        )
    rank, kind = own
    if isinstance(rank, str) and not isinstance(kind, str):
        rank, kind = kind, rank  # the other way round says the same
    return a_rank(rank), one_of(*_KINDS)(kind), diagnosis(hidden)


@exercise("3.3", _suspect)
def who_and_what(answer: tuple[int, str, Diagnosis]) -> str:
    """Rank 1 was told another WORLD_SIZE, found itself alone, and was done."""
    rank, kind, hidden = answer
    if not hidden.findings:
        raise WrongAnswer(
            "there is no finding in this diagnosis: run the cell that makes it again."
        )
    first = hidden.findings[0]
    if rank not in first.ranks:
        raise WrongAnswer(
            f"rank {rank} does the same as most other ranks, with the same settings. Which rank "
            "differs?"
        )
    if kind == first.category:
        return (
            f"right: {first.cause}. It met every rank that it expected, itself, and was done. An "
            "idle rank is not always one that never came."
        )
    if kind == "missing-rank":
        raise WrongAnswer(
            "the rank is right, and it does look as if it never came. But then it would not have "
            "been told anything: compare what the evidence says of it with the others."
        )
    if kind == "duplicate-rank":
        raise WrongAnswer(
            "the rank is right. Do two processes say the same number? The evidence is about "
            "another variable."
        )
    raise WrongAnswer(
        "the rank is right. Its process is alive and does nothing, so it is neither dead nor late: "
        "what was it told?"
    )


@exercise("3.4", diagnosis)
def a_duplicate_of_your_own(own: Diagnosis) -> str:
    """Two processes with one number, and the last rank the one that has it wrongly."""
    if not own.findings:
        raise WrongAnswer(
            "nothing is wrong with these ranks. Were they started with --set, and moved on by "
            "%ddp_step --to verified before you asked?"
        )
    first = own.findings[0]
    if first.passing:
        raise WrongAnswer(
            "the ranks are still held before a stage. Move them on first: %ddp_step --to verified"
        )
    if first.category is not Category.DUPLICATE_RANK:
        raise WrongAnswer(
            f"your mistake is found to be {first.category}: {first.cause}. For a "
            "duplicate, two processes must say the same RANK, and one that exists."
        )
    last = own.world_size - 1
    if first.ranks != (last,):
        raise WrongAnswer(
            f"it is a duplicate, and {name_ranks(first.ranks)} is blamed for it. The culprit has "
            f"another rank's number: here that must be rank {last}."
        )
    return (
        "right. RANK is the only one of the four variables that must differ, and nothing checks it."
    )


def _names(answer: Any) -> frozenset[str]:
    try:
        names = answer.split(",") if isinstance(answer, str) else list(answer)
    except TypeError:
        raise WrongAnswer(f"expected a list of names, got {shown(answer)}.") from None
    return frozenset(map(one_of(*_ON_ONE_MACHINE, *_AMONG_RANKS), names))


@exercise("3.5", _names)
def seen_before_the_start(names: frozenset[str]) -> str:
    """Some findings are facts about one machine, others are relations among ranks."""
    for name, why in _AMONG_RANKS.items():
        if name in names:
            raise WrongAnswer(f"not {name}: {why}.")
    if len(names) < len(_ON_ONE_MACHINE):
        raise WrongAnswer(
            "your names are right, but something is missing. Which facts can a machine "
            "look up by itself?"
            if names
            else "some of them can. Which facts can a machine look up by itself?"
        )
    whys = "; ".join(_ON_ONE_MACHINE.values())
    return f"right: {whys}. The others are about ranks among themselves."
