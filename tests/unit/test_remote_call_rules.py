"""Workers of torch's RPC that wait for calls, and others that are in rpc.shutdown()."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from setup_cases import coming, failed, found, idle, the_one, waiting

from ddp_notebook.model import Blocked, Category, Lacks, RankReport
from ddp_notebook.rank.inspect import waiting as rank_waiting


def lacks(rank: int, what: Lacks) -> RankReport:
    return coming(rank, blocked=Blocked(what))


def shut(rank: int) -> RankReport:
    return lacks(rank, Lacks.SHUTDOWN)


def test_a_worker_that_no_call_will_wake_any_more_is_told() -> None:
    finding = the_one(shut(0), shut(1), lacks(2, Lacks.REMOTE_CALL))
    assert (finding.category, finding.ranks) == (Category.LOCAL_DEADLOCK, (2,))
    assert "ranks 0-1 are in rpc.shutdown()" in finding.cause and finding.waiting == (0, 1)
    both = found(lacks(0, Lacks.REMOTE_CALL), lacks(1, Lacks.REMOTE_CALL))
    assert both == [(Category.LOCAL_DEADLOCK, (0, 1))]


def test_a_call_that_waits_for_what_no_later_call_brings_is_told() -> None:
    runs = coming(1, blocked=Blocked(Lacks.OWN_CALLS, threads=("a call waits at serve.py:9",)))
    finding = the_one(lacks(0, Lacks.ANSWER), runs, shut(2))
    assert (finding.category, finding.ranks) == (Category.LOCAL_DEADLOCK, (1,))
    assert "(a call waits at serve.py:9)" in finding.cause and finding.waiting == (0, 2)


def test_a_worker_that_ends_without_shutdown_is_told() -> None:
    finding = the_one(shut(0), shut(1), idle(2))
    assert (finding.category, finding.ranks) == (Category.EARLY_EXIT, (2,))


@pytest.mark.parametrize(
    "ranks",
    [
        (shut(0), coming(1), lacks(2, Lacks.REMOTE_CALL)),  # rank 1 may call it
        (shut(0), shut(1), coming(2)),
        (shut(0), shut(1), shut(2)),
        (coming(0), idle(1), idle(2)),
        (lacks(0, Lacks.ANSWER), coming(1), shut(2)),  # rank 1 runs the call
        (lacks(0, Lacks.ANSWER), lacks(1, Lacks.OWN_CALLS), coming(2)),  # rank 2 may end it
        (lacks(0, Lacks.ANSWER), lacks(1, Lacks.REMOTE_CALL), shut(2)),  # the answer may be coming
    ],
)
def test_while_a_worker_is_busy_or_all_shut_down_nothing_is_said(ranks: Any) -> None:
    assert not [category for category, _ in found(*ranks)]


def test_a_worker_that_failed_is_told_as_that_alone() -> None:
    told = found(shut(0), waiting(1), failed(2, "boom", "ValueError"))
    assert Category.EARLY_EXIT not in [category for category, _ in told]


def test_a_call_that_runs_on_a_thread_of_torchs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.get_ident()
    monkeypatch.setattr(sys, "_current_frames", lambda: {own: None})
    assert not rank_waiting._served()
    monkeypatch.setattr(sys, "_current_frames", lambda: {own: None, -1: None})
    assert list(rank_waiting._served()) == [-1]
    assert not rank_waiting._is_worker(), "this process uses no RPC"


def test_which_store_a_call_is_given_says_its_prefix(tmp_path: Path) -> None:
    from ddp_notebook.rank.setup import own_stores, rendezvous

    class Prefixed(dist.PrefixStore):
        __init__ = own_stores._with_its_prefix(dist.PrefixStore.__init__)

    below = dist.HashStore()
    store = Prefixed("run", Prefixed("job-1", below))
    assert rendezvous.prefixes[store] == "run"
    path = dist.FileStore(str(tmp_path / "store"), 1)
    assert rendezvous._which(Prefixed("run", Prefixed("job-1", path))).endswith("'job-1/run'")
    assert "prefix" not in rendezvous._which(path)
