"""What code in the notebook replaced of Python's own is named where a verb fails for it."""

from __future__ import annotations

import builtins
import json
import os
from typing import Any

import pytest

from ddp_notebook import replaced


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
