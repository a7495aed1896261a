"""Where in the user's code a collective comes from, as a rank finds it by its own stack."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from ddp_notebook.model import Part
from ddp_notebook.rank.collectives import call_sites
from ddp_notebook.rank.collectives.call_sites import Caller, CallSite, CallSites
from ddp_notebook.rank.inspect.frames import UserCode

SITES = CallSites(UserCode())


def _torchs() -> tuple[Callable[[], CallSite], Callable[[], CallSite]]:
    """Functions of a module that is no user's: one asks like the observer, one like autograd."""
    source = (
        "import sys\n"
        "def all_reduce(): return sites.site(sys._getframe())\n"
        "def wrapper(): return all_reduce()\n"
        "def engine(): return sites.site(sys._getframe())\n"
    )
    names = {"__name__": "torch.autograd.graph", "sites": SITES}
    exec(compile(source, "/site-packages/torch/some.py", "exec"), names)
    return names["wrapper"], names["engine"]


WRAPPER, ENGINE = _torchs()


def _wrapped(name: str) -> Callable[[], CallSite]:
    """A function of torch.distributed's in the wrapper they all have, asked by an observer."""
    inner = {"__name__": "torch.distributed.distributed_c10d", "sites": SITES, "sys": sys}
    code = (
        "def record(): return sites.site(sys._getframe(2))\n"
        "def observed(): return record()\n"
        f"def {name}(): return observed()\n"
    )
    exec(compile(code, "/site-packages/torch/distributed/some.py", "exec"), inner)
    logger = {"__name__": "torch.distributed.c10d_logger", "inner": inner[name]}
    code = "def wrapper(): return inner()\n"
    exec(compile(code, "/site-packages/torch/distributed/logger.py", "exec"), logger)
    return logger["wrapper"]  # type: ignore[return-value]


ALL_REDUCE, BROADCAST = _wrapped("all_reduce"), _wrapped("broadcast")


def lines(site: CallSite) -> list[str]:
    return [line.function for line in site.path[-2:]]


def reduce_it() -> CallSite:
    return WRAPPER()


def one() -> CallSite:
    return reduce_it()


def other() -> CallSite:
    return reduce_it()


def test_a_line_that_is_reached_in_two_ways_is_two_sites() -> None:
    found = [call() for call in (one, other, one, one, other, other, one)]
    assert [lines(site)[0] for site in found] == [
        "one", "other", "one", "one", "other", "other", "one"
    ]  # fmt: skip
    assert len({site.number for site in found}) == 2
    # The same way is the same site, though it was looked up by comparing with the last one.
    assert found[0] is found[2] is found[3] is found[6]


def test_ways_that_take_turns_through_one_line_are_looked_up_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the messages of a pipeline do, which all pass one line of torch's."""
    found = []
    for turn in range(6):
        if turn == 2:
            monkeypatch.setattr(SITES, "_look_up", lambda *_: pytest.fail("looked up again"))
        found.append((one, other)[turn % 2]())
    assert found == found[:2] * 3


def _of_a_module(module: str, code: str, **names: object) -> Callable[[], CallSite]:
    """The function `call` of this code, in a library's module."""
    values = {"__name__": module, "sites": SITES, "sys": sys, **names}
    exec(compile(code, f"/site-packages/{module}.py", "exec"), values)
    return values["call"]  # type: ignore[return-value]


def test_who_calls_is_told_apart_where_one_line_of_the_users_calls_both() -> None:
    through = "def call(): return it()\n"
    operator = _of_a_module("torch._ops", "def call(): return sites.site(sys._getframe())\n")
    asked = {
        ALL_REDUCE: Caller.USER,
        _of_a_module("library", through, it=ALL_REDUCE): Caller.LIBRARY,
        operator: Caller.OPERATOR_OF_USER,
        _of_a_module("library", through, it=operator): Caller.OPERATOR_OF_LIBRARY,
    }
    for _ in range(2):  # as they are looked up, and as they are remembered
        assert {call: call().caller for call in asked} == asked


def recursive(depth: int) -> CallSite:
    return recursive(depth - 1) if depth else reduce_it()


def test_recursion_of_another_depth_is_another_site() -> None:
    first = [recursive(depth) for depth in (0, 3, 1, 3, 0)]
    assert [len(site.path) - len(first[0].path) for site in first] == [0, 3, 1, 3, 0]
    assert first[1] is first[3] and first[0] is first[4]


def backward(inner: Callable[[], object] = lambda: None) -> tuple[CallSite, CallSite]:
    outer = SITES.backward_begins(sys._getframe())
    try:
        before = ENGINE()
        inner()
        return before, ENGINE()
    finally:
        SITES.backward_ends(outer)


def test_what_the_engine_reduces_belongs_to_the_backward_that_is_under_way() -> None:
    ENGINE()  # its code is known from now on
    before, after = backward()
    assert before is after and (before.api, before.part) == ("backward", Part.BACKWARD)
    assert lines(before)[-1] == "backward" and not before.variables
    assert ENGINE().part is None, "it is over"


def test_a_backward_on_the_same_way_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a pipeline has one for each micro-batch."""
    ENGINE()  # its code is known from now on
    found = []
    for turn in range(4):
        if turn == 2:
            monkeypatch.setattr(SITES, "_look_up", lambda *_: pytest.fail("looked up again"))
        found.append((backward, lambda: backward())[turn % 2]())
    assert found == found[:2] * 2 and found[0][0] is not found[1][0]


def test_a_backward_within_a_backward_does_not_take_its_place() -> None:
    ENGINE()
    within: list[CallSite] = []
    before, after = backward(lambda: within.extend(backward()))
    assert before is after and within[0] is within[1] is not before


def test_a_thread_without_frames_has_the_site_of_the_backward() -> None:
    ENGINE()  # its code is known from now on
    seen: list[CallSite] = []
    before, _ = backward(lambda: seen.append(SITES.site(None)))
    assert seen == [before]
    assert SITES.site(None).path == ()


def test_another_threads_backward_is_not_taken_for_ones_own() -> None:
    ENGINE()
    found: list[CallSite] = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: found.append(ENGINE()))
        thread.start()
        thread.join()

    before, _ = backward(elsewhere)
    assert found[0] is not before and found[0].part is None


def test_a_name_that_is_never_a_text_is_not_asked_for_any_more() -> None:
    def log(value: object) -> tuple[CallSite, str]:
        site = reduce_it()
        return site, SITES.metric_name(sys._getframe(), site) if site.variables else ""

    found = [log(value) for value in (1, 2, 3, 4, 5)]
    assert {text for _, text in found} == {""}
    assert found[0][0] is found[4][0] and found[4][0].variables == ()


def test_a_path_is_not_the_name_of_what_is_reduced() -> None:
    def log(value: str) -> str:
        return SITES.metric_name(sys._getframe(), reduce_it())

    assert "train/loss" in log("train/loss") and log("/data/ck-1.pt") == ""


def test_code_that_is_made_anew_all_the_time_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_sites, "_MOST_KNOWN", 50)
    for _ in range(200):
        names: dict[str, object] = {"ask": reduce_it, "path": SITES.users_path, "sys": sys}
        exec("found = ask(), path(sys._getframe())", names)
        assert len(SITES._codes) < 100 and len(SITES._sites) < 100
    first, second = [one() for _ in range(2)]
    assert first is second
    SITES.run_begins()
    assert SITES._codes
    monkeypatch.setattr(call_sites, "_MOST_BETWEEN_RUNS", 1)
    SITES.run_begins()
    assert not SITES._codes and one() is not first


def test_what_a_wrapper_calls_is_told_from_what_else_comes_from_the_same_place() -> None:
    found = [call() for call in (ALL_REDUCE, BROADCAST, ALL_REDUCE, BROADCAST)]
    assert [site.api for site in found] == ["all_reduce", "broadcast"] * 2
    assert found[0] is found[2] and found[1] is found[3]


def through_a() -> CallSite:
    return ALL_REDUCE()


def through_b() -> CallSite:
    return ALL_REDUCE()


def test_users_code_between_torchs_function_and_a_loop_is_never_skipped() -> None:
    found = [call() for call in (through_a, through_b, through_a, through_b)]
    assert [lines(site)[-1] for site in found] == ["through_a", "through_b"] * 2


def test_where_a_metrics_name_is_held_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    innermost = SITES._innermost

    def looks(frame: FrameType | None) -> object:
        looked.append(frame)
        return innermost(frame)

    def log(name: str) -> str:
        site = reduce_it()
        with monkeypatch.context() as patches:
            patches.setattr(SITES, "_innermost", looks)
            return SITES.metric_name(sys._getframe(), site)

    found = [log(name) for name in ("loss", "accuracy", "loss")]
    assert [("loss" in a, "accuracy" in a) for a in found] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert len(looked) == 1


def test_what_was_installed_is_no_users_code_whatever_the_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, own = tmp_path / "libs", tmp_path / "project"
    for folder in (installed, own):
        (folder / "lib-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(
        "sys.path", [str(own), str(tmp_path / "plain"), str(installed), "", "x.zip"]
    )
    code = UserCode()
    assert not code.is_users(f"{installed}/lib/core.py")
    assert code.is_users(f"{own}/model.py"), "the working folder"
    assert code.is_users(f"{tmp_path}/plain/model.py") and code.is_users(f"{installed}2/model.py")
    code.add_script(f"{installed}/train.py")
    assert code.is_users(f"{installed}/model.py"), "beside a script that is run"
