"""The exercises of notebook 2: what `init_process_group` really does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ddp_notebook.launch.process_ids import pid_of
from ddp_notebook.model import Board, Ranks, name_ranks
from ddp_notebook.workshop.answers import (
    AS_IT_IS,
    by_rank,
    one_of,
    parts,
    ranks,
    shown,
    text,
    whole_number,
)
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise


def _key(answer: Any) -> str:
    """A key, without what people write around it."""
    return re.sub(r"^(?:the )?key\s+|[\s'\"`/]+$|^[\s'\"`/]+", "", text(answer).casefold())


@exercise("2.1", _key)
def key_they_wait_for(key: str) -> str:
    """Rank 1 is held back before the rendezvous."""
    if key == "join/1":
        return "right. Rank 1 has not written it, and every other rank waits for it."
    if key in {f"join/{rank}" for rank in range(NOTEBOOK.world_size)}:
        raise WrongAnswer(
            f"{key} is in the store already: rank {key[-1]} has signed in. Whose key is missing? "
            "The last line of the table lists those that are there."
        )
    if re.fullmatch(r"\D*1", key):
        raise WrongAnswer("the right rank, but not the key's name: the table writes it in full.")
    raise WrongAnswer(
        f"{shown(key)} is not a key that they wait for. Look at the column 'where, or why'."
    )


@exercise("2.2", ranks())
def those_that_only_wait(answer: Ranks) -> str:
    """All wait for rank 1."""
    others = tuple(rank for rank in range(NOTEBOOK.world_size) if rank != 1)
    if 1 in answer:
        raise WrongAnswer("rank 1 is the missing one: the others wait for it.")
    missing = tuple(rank for rank in others if rank not in answer)
    if missing or len(answer) != len(others):
        raise WrongAnswer(
            f"so do others: {name_ranks(missing)}. In the table, look who is 'waiting'."
            if missing
            else f"the ranks are 0 to {NOTEBOOK.world_size - 1}."
        )
    return "right. They have signed in and can do no more. Rank 0 is just the one that people see."


def _neighbours(answer: Any) -> tuple[Mapping[int, str], Board]:
    neighbour, board = parts(answer)
    if not isinstance(board, Board):
        raise WrongAnswer(AS_IT_IS)
    return by_rank(_pid)(neighbour), board


def _pid(answer: Any) -> str:
    """A process number as a text; as a number it will do."""
    return str(answer) if isinstance(answer, int) else text(answer)


@exercise("2.3", _neighbours)
def process_of_the_neighbour(answer: tuple[Mapping[int, str], Board]) -> str:
    """Each rank knows the pid of the next one; the board knows them all."""
    neighbour, board = answer
    pids = {str(pid_of(state.pid)): state.rank for state in board.snapshot.ranks}
    for rank, value in neighbour.items():
        whose = pids.get(value)
        wanted = (rank + 1) % len(pids)
        if whose is None:
            raise WrongAnswer(
                f"rank {rank} has {shown(value)}, which is the process of no rank. If it looks "
                "like b'...', it is still in bytes: .decode() it."
            )
        if whose != wanted:
            raise WrongAnswer(
                f"rank {rank} has the process of rank {whose}, but needs that of rank {wanted}: "
                "the last rank's neighbour is rank 0, so count modulo world_size."
            )
    return (
        "right, on all ranks. No rank had to write before another one read: get waits for its key."
    )


@exercise("2.4", by_rank(whole_number))
def ranks_that_were_counted(counted: Mapping[int, int]) -> str:
    """All have counted all ranks."""
    everyone = len(counted)
    for rank, count in counted.items():
        if count > everyone:
            raise WrongAnswer(
                f"rank {rank} counted {count}. A key of `store` keeps its value when the cell is "
                "run again: use `counter`, which is empty each time, for all that you write."
            )
        if count < everyone:
            raise WrongAnswer(
                f"rank {rank} counted {count}: it looked before the others had come. It must wait "
                "until the last one says so."
            )
    return f"right: {everyone} on every rank. Who comes last lets all others go: that is a barrier."


@exercise("2.5", one_of("none at all", "only to the file", "to each other"))
def what_a_file_saves(answer: str) -> str:
    """The file replaces the store and nothing else."""
    if answer != "to each other":
        raise WrongAnswer(
            "the file is only where they meet. What does each rank do with the addresses that it "
            "reads there?"
        )
    return (
        "right. The file stands for the store. The group's own connections go from rank to rank, "
        "and a firewall between the nodes stops them all the same."
    )
