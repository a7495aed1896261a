"""Ranks as setup finds them, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Finding,
    InitArguments,
    Probe,
    RankReport,
    Ranks,
)

HOST, PORT = "127.0.0.1", 29500

IN_SETUP = ("store", "rendezvous", "process-group")


def arguments(rank: int, world_size: int = 3, store: str = "session", **more: Any) -> InitArguments:
    """With what a rank of a healthy job comes."""
    made = InitArguments(
        "env",
        rank,
        world_size,
        HOST,
        PORT,
        backend="gloo",
        timeout_s=60.0,
        hosts_store=store == "rank0" and rank == 0,
        raw={"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(PORT)},
    )
    return with_facts(made, **more)


def coming(rank: int, **more: Any) -> RankReport:
    """It runs code of its own and has not called init_process_group."""
    made = report(rank, Activity.BUSY, doing="load (train.py, line 7)", main_cpu_s=2.0)
    return with_facts(made, **more)


def waiting(
    rank: int, inside: str = "rendezvous", came: InitArguments | None = None, **more: Any
) -> RankReport:
    """It waits in setup, its store reached."""
    came = came or arguments(rank)
    target = f"{came.master_addr}:{came.master_port}"
    in_the_group = inside in ("collective", "ddp")
    made = report(
        rank,
        Activity.WAITING,
        inside,
        entered=1,
        left=int(in_the_group),
        initialized=in_the_group,
        arguments=came,
        probe=Probe(target, "open"),
        addresses={came.master_addr: (came.master_addr,)},
        versions={"torch": "2.9.0", "python": "3.12.1"},
    )
    return with_facts(made, **more)


def knocking(rank: int, came: InitArguments | None = None, state: str = "refused") -> RankReport:
    """It connects where nothing listens."""
    came = came or arguments(rank)
    probe = Probe(f"{came.master_addr}:{came.master_port}", state, "Connection refused")
    return waiting(rank, "store", came, probe=probe)


def done(rank: int, came: InitArguments | None = None, **more: Any) -> RankReport:
    """Its setup is complete."""
    made = waiting(rank, "collective", came)
    return with_facts(made, activity=Activity.IDLE, inside="", **more)


def idle(rank: int, **more: Any) -> RankReport:
    """It runs nothing and never came."""
    return report(rank, Activity.IDLE, **more)


def failed(rank: int, text: str, kind: str = "RuntimeError", **more: Any) -> RankReport:
    """What it ran raised an error, after it had called init_process_group."""
    made = report(
        rank,
        Activity.FAILED,
        entered=1,
        arguments=arguments(rank),
        error_type=kind,
        error_text=text,
    )
    return with_facts(made, **more)


TOLD = {"MASTER_ADDR": HOST, "MASTER_PORT": str(PORT)}


def case(
    *ranks: RankReport,
    store: str = "session",
    told: Mapping[str, str] | None = None,
    store_alive: bool = True,
) -> Case:
    """A job of these ranks."""
    told = {**TOLD, "WORLD_SIZE": str(len(ranks))} if told is None else told
    return Case(ranks, told, 0 if store == "rank0" else None, store_alive)


def found(*ranks: RankReport, **more: Any) -> list[tuple[Category, Ranks]]:
    """What is wrong with a job of these ranks: categories and culprits, without what passes."""
    return [
        (f.category, f.ranks)
        for f in diagnose_setup(case(*ranks, **more)).findings
        if not f.passing
    ]


def the_one(*ranks: RankReport, **more: Any) -> Finding:
    """The only finding that does not pass."""
    (finding,) = [f for f in diagnose_setup(case(*ranks, **more)).findings if not f.passing]
    assert finding.cause
    assert finding.remedy
    assert "\n" not in finding.cause + finding.remedy
    return finding
