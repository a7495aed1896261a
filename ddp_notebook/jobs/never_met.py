"""Mistakes of set-up that logs alone prove: ranks that looked for each other elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.evidence.connects import Connects
from ddp_notebook.model import Activity, Case, Category, Collective, Finding, Ranks, name_ranks

_INIT = "init_process_group"
_KEYS_OF_PEERS = re.compile(r"keys: /?default_pg/")
_FILE_STORE = re.compile(r"file://|FileStore\(")


def never_met(case: Case, connects: Connects) -> Iterator[Finding]:
    """What kept the ranks of these logs from making a group; nothing where that is not proven."""
    yield from _old_file(case, connects)
    yield from _other_port(case, connects)
    yield from _kept_away(case, connects)


def absent(case: Case, connects: Connects) -> Ranks:
    """Ranks for whose address others waited in vain, and of whom these files say nothing else."""
    return tuple(
        rank
        for rank in sorted(connects.awaited)
        if rank >= case.world_size or case.ranks[rank].activity is Activity.SILENT
    )


def _old_file(case: Case, connects: Connects) -> Iterator[Finding]:
    """All ranks found addresses in the file of a store, but no process listens at any of them."""
    everybody = tuple(range(connects.size))
    lines = [place.text for report in case.ranks for place in report.error_at]
    if everybody and connects.refused == set(everybody) and any(map(_FILE_STORE.search, lines)):
        yield Finding(
            Category.STALE_STORE,
            everybody,
            "each rank found addresses of others in the store's file, and no process listens "
            "there: the file is of an earlier run",
            "Delete the file before each run, or give each run a file of its own.",
        )


def _other_port(case: Case, connects: Connects) -> Iterator[Finding]:
    """Ranks that looked for the store at the wrong port, while others waited at the right one."""
    waited = tuple(e.rank for e in case.ranks if _KEYS_OF_PEERS.search(e.error_text))
    rest = tuple(e.rank for e in case.ranks if e.rank not in waited)
    silent = all(case.ranks[rank].activity is Activity.SILENT for rank in rest)
    # Each of them looked at a port of its own: so all of them looked elsewhere.
    if not (waited and rest and silent and len(connects.reached) == 1):
        return
    if len(connects.unanswered) != len(rest) or connects.unanswered & connects.reached:
        return
    (port,) = connects.reached
    ports = " and ".join(map(str, sorted(connects.unanswered)))
    yield Finding(
        Category.ENV_MISMATCH,
        rest,
        f"looked for the store at port {ports}, where no process answers; {name_ranks(waited)} "
        f"waited at the store on port {port}",
        "Give every rank the same MASTER_ADDR and MASTER_PORT.",
        waited,
    )


def _kept_away(case: Case, connects: Connects) -> Iterator[Finding]:
    """Ranks that a test of the rank keeps from the call in which the others waited for them."""
    missing = absent(case, connects)
    waited = tuple(e.rank for e in case.ranks if _KEYS_OF_PEERS.search(e.error_text))
    if not (missing and waited and set(waited) == set(case.where(Activity.FAILED))):
        return
    call = Collective(waited[0], 0, _INIT, api=_INIT, path=case.ranks[waited[0]].error_at)
    test = Sources(case.sources, case.files_seen).condition(call, None, waited, missing)
    if test is not None and test.decides is Varies.JUST_SO:
        yield Finding(
            Category.MISSING_RANK,
            missing,
            f"never called {_INIT} ({test.quoted}), in which {name_ranks(waited)} waited until the "
            "time limit",
            "Call it on every rank: no condition may keep a rank from it.",
            waited,
            (f"{test.place}: {test.place.text}",),
        )
