"""What code in the notebook replaced of Python's own is named where a verb fails for it."""

from __future__ import annotations

import builtins
import io
import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook import replaced
from ddp_notebook.cluster import event_receiver
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.model import codec
from ddp_notebook.session.processes.awake import KeptAwake


def raised(call: Any, *args: Any) -> BaseException:
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001  # whatever it is
        return error
    raise AssertionError("nothing was raised")


def test_what_can_no_longer_be_called_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", None)
    monkeypatch.setattr(os, "read", None)
    error = raised(lambda: json.dumps({}))
    assert "json.dumps, os.read were replaced" in replaced.why(error)
    around = RuntimeError("something about ranks")
    around.__cause__ = error
    assert "json.dumps" in replaced.why(around)
    assert replaced.why(ValueError("not of that kind")) == ""


def test_a_replacement_that_works_is_named_only_where_the_error_passed_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(f"not {path}")

    monkeypatch.setattr(builtins, "open", own)
    error = raised(open, "file")
    assert "builtins.open was replaced" in replaced.why(error)
    assert replaced.why(raised(lambda: {}["nothing"])) == ""


def test_an_error_with_nothing_replaced_is_left_as_it_is() -> None:
    assert replaced.why(TypeError("'NoneType' object is not callable")) == ""


def test_what_threads_of_the_notebook_read_and_write_needs_nothing_that_a_cell_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that ended by an error would leave the session deaf, also when all is set back."""
    monkeypatch.setattr(json, "dumps", None)
    monkeypatch.setattr(json, "loads", None)
    assert codec.loads(codec.dumps({"rank": 1})) == {"rank": 1}
    client = ForkServerClient.__new__(ForkServerClient)
    heard: list[object] = []
    monkeypatch.setattr(client, "_handle", heard.append, raising=False)
    process = SimpleNamespace(stdout=io.BytesIO(b'{"event": "ready"}\n'))
    monkeypatch.setattr(client, "_process", process, raising=False)
    client._listen()
    assert heard == [{"event": "ready"}]


def test_what_cannot_be_read_now_is_lost_and_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    source = event_receiver._Source(b"", heard.extend)
    with monkeypatch.context() as patch:
        patch.setattr(event_receiver, "decode_events", None)
        assert source.read(b"[]") == []
    assert source.read(b"[]") == []


def test_who_keeps_processes_awake_goes_on_after_a_look_that_failed() -> None:
    looked = threading.Event()
    looks: list[int] = []

    def pids() -> dict[int, str]:
        looks.append(1)
        if len(looks) == 1:
            raise TypeError("'NoneType' object is not callable")
        looked.set()
        return {}

    kept = KeptAwake(pids, lambda pid, name: None)
    try:
        assert looked.wait(30)
    finally:
        kept.close()
