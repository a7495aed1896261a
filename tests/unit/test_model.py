"""Rank sets, and events on the wire."""

from __future__ import annotations

import contextlib
import json
import typing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook import model
from ddp_notebook.model import (
    Category,
    Finding,
    codec,
    cut,
    decode_events,
    encode_events,
    format_ranks,
    name_ranks,
    parse_ranks,
)
from ddp_notebook.model.codec import DecodeError

rank_sets = st.sets(st.integers(0, 300), min_size=1)


@given(rank_sets)
def test_a_rank_set_is_read_back_as_it_was_written(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), 301) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("0,2", (0, 2)),
        ("1-3", (1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("3, 0-1", (0, 1, 3)),
        ("0\u20132", (0, 1, 2)),  # copied from a web page
    ],
)
def test_rank_sets_are_written_in_these_ways(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "Rank 4 does not exist: world size is 4, so ranks are 0 to 3."),
        ("2-9", "Rank 9 does not exist: world size is 4, so ranks are 0 to 3."),
        ("3-1", "'3-1' runs backwards: write 1-3."),
        ("one", "'one' is not a set of ranks: write 0, 0,2, 1-3 or all."),
        ("", "'' is not a set of ranks: write 0, 0,2, 1-3 or all."),
        ("-1", "'-1' is not a set of ranks: write 0, 0,2, 1-3 or all."),
    ],
)
def test_a_wrong_rank_set_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        parse_ranks(text, 4)
    assert str(caught.value) == message


def test_ranks_are_named_in_a_sentence() -> None:
    assert name_ranks((1,)) == "rank 1"
    assert name_ranks((0, 1, 3)) == "ranks 0, 1 and 3"


def _values(annotation: str) -> st.SearchStrategy[Any]:
    return {
        "int": st.integers(-(2**53), 2**53),
        "str": st.text(),
        "bool": st.booleans(),
        "Stage": st.sampled_from(model.Stage),
        "OutputKind": st.sampled_from(model.OutputKind),
        "tuple[Place, ...]": st.lists(st.builds(model.Place, st.text(), st.integers(0, 9))).map(
            tuple
        ),
        "tuple[str, ...]": st.lists(st.text()).map(tuple),
        "Mapping[str, Any]": st.dictionaries(st.text(), st.integers() | st.text()),
    }[annotation]


@st.composite
def events(draw: st.DrawFn) -> model.Event:
    cls = draw(st.sampled_from(typing.get_args(model.AnyEvent)))
    fields = {name: of for each in cls.__mro__[:2] for name, of in each.__annotations__.items()}
    values = {name: draw(_values(of)) for name, of in fields.items()}
    return cls(**{**values, "heard_ns": 0})


@given(events())
def test_an_event_survives_the_wire(event: model.Event) -> None:
    assert decode_events(encode_events([event]), 0) == [event]


PULSE = {"kind": "pulse", "rank": 0}


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({}, "missing required field `kind`"),
        ({"kind": "nonsense"}, "kind: invalid value 'nonsense'"),
        ({"kind": ["pulse"]}, "kind: expected `str`, got `list`"),
        ({"kind": "pulse", "bogus": 1}, "missing required field `rank`"),
        ({**PULSE, "doing": 1}, "doing: expected `str`, got `int`"),
        ({**PULSE, "seq": "1"}, "seq: expected `int`, got `str`"),
        ({"kind": "stage_started", "rank": 0, "stage": "x"}, "stage: invalid enum value 'x'"),
        ({"kind": "stage_started", "rank": 0, "stage": []}, "stage: expected `str`, got `array`"),
        (
            {"kind": "output", "rank": 0, "cell": 1, "what": "stdout", "data": 1},
            "data: expected `object`, got `int`",
        ),
        (1, "expected `object`, got `int`"),
    ],
)
def test_what_is_no_event_is_passed_over_and_the_others_are_read(wire: Any, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        codec.decode(model.AnyEvent, wire)
    message = json.dumps([PULSE, wire, {**PULSE, "rank": 1}]).encode()
    assert [event.rank for event in decode_events(message, 5)] == [0, 1]


@pytest.mark.parametrize("message", [PULSE, None, 1, "text"])
def test_what_is_no_list_of_events_is_refused(message: Any) -> None:
    with pytest.raises(DecodeError, match="must be a list"):
        decode_events(json.dumps(message).encode(), 5)


@given(st.binary() | st.text().map(str.encode))
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert decode_events(message, 5) == []


def test_a_message_says_when_it_was_heard_and_tolerates_what_a_later_version_adds() -> None:
    (event,) = decode_events(json.dumps([{**PULSE, "later": 1}]).encode(), 7)
    assert event == model.Pulse(rank=0, heard_ns=7)


def test_what_a_display_holds_that_is_no_json_is_sent_as_text() -> None:
    shown = model.Output(rank=0, cell=1, what=model.OutputKind.DISPLAY, data={"x": {1}})
    (event,) = decode_events(encode_events([shown]), 0)
    assert isinstance(event, model.Output)
    assert event.data == {"x": "{1}"}


def test_stages_are_numbered_in_the_order_they_happen() -> None:
    assert [stage.number for stage in model.Stage] == [1, 2, 3, 4, 5, 6]
    assert model.Stage.VERIFIED.label == "verified"


def test_text_is_cut_where_it_is_too_long_and_says_so() -> None:
    assert cut("as it is", 8) == "as it is"
    assert cut("one two three", 5) == "one…"
    assert len(cut("x" * 500, 300)) == 300


def test_a_culprit_is_never_among_those_that_only_wait() -> None:
    both = Finding(Category.MISMATCHED_ORDER, (0, 2), "cause", "remedy", (0, 1, 2, 3))
    assert both.waiting == (1, 3)
    assert replace(both, ranks=(1,), waiting=(0, 1, 2)).waiting == (0, 2)
    assert both.to_json()["waiting"] == [1, 3]
