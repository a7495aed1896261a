"""A run survives its file; a file that is damaged, foreign or newer is refused in words."""

from __future__ import annotations

import copy
import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_runs import job, runs
from traces import report

from ddp_notebook.archive.format import KEY, VERSION, SavedRun, decode_run, encode_run
from ddp_notebook.archive.replay import what_is_missing
from ddp_notebook.archive.save import write
from ddp_notebook.errors import DDPError, NoSession, UsageMistake
from ddp_notebook.model import (
    GROUPED,
    Output,
    OutputKind,
    Progress,
    RankExited,
    RankReport,
    RankSpawned,
)
from ddp_notebook.model.codec import DecodeError, decode, dumps, encode
from ddp_notebook.session import Replay, Session

slow_to_draw = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def written(folder: Path, wire: Any) -> Path:
    """A file with `wire` as JSON."""
    path = folder / "run.json"
    path.write_text(json.dumps(wire))
    return path


def whole(saved: SavedRun) -> dict[str, Any]:
    """What a file of ours holds, as far as a replay reads it."""
    return {"traceEvents": [], KEY: encode_run(saved)}


# --------------------------------------------------------------------------- there and back


@given(runs())
@slow_to_draw
def test_any_run_is_read_back_as_it_was_written(saved: SavedRun) -> None:
    text = json.dumps(encode_run(saved), allow_nan=False)
    assert decode_run(json.loads(text)) == saved


def test_numbers_that_json_does_not_have_are_kept() -> None:
    evidence = report(0, main_cpu_s=math.inf)
    wire = json.loads(json.dumps(encode(evidence), allow_nan=False))
    assert decode(RankReport, wire) == evidence
    nothing = encode(Progress(rank=0, task="bench", done=1, total=2, value={"time": math.nan}))
    assert json.loads(dumps(nothing))["value"] == {"time": "NaN"}


def test_what_a_later_field_adds_may_be_missing_or_unknown() -> None:
    wire = encode(RankReport(3))
    del wire["awaits"]["file"]
    wire["not known yet"] = 1
    assert decode(RankReport, wire) == RankReport(3)


def test_a_pair_is_two_of_their_own_types() -> None:
    assert decode(tuple[int, str], [1, "x"]) == (1, "x")
    with pytest.raises(DecodeError, match="`array` of length 2, got 3"):
        decode(tuple[int, str], [1, "x", 2])


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({"activity": "busy"}, "the value: object missing required field `rank`"),
        ({"rank": "0"}, "rank: expected `int`, got `str`"),
        ({"rank": True}, "rank: expected `int`, got `bool`"),
        ({"rank": 0, "activity": "asleep"}, "activity: invalid enum value 'asleep'"),
        ({"rank": 0, "path": [{"file": "a.py"}]}, "path[0]: object missing required field `line`"),
        ({"rank": 0, "path": {}}, "path: expected `array`, got `object`"),
        (
            {"rank": 0, "file": {"claims": {"0": None}}},
            "file.claims[...]: expected `int`, got `null`",
        ),
        ([], "the value: expected `object`, got `array`"),
    ],
)
def test_a_decode_error_says_where_it_stands(wire: Any, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankReport, wire)
    assert str(caught.value).startswith(said)


# --------------------------------------------------------------------------- files that are not


def refusal(path: Path) -> str:
    with pytest.raises(UsageMistake) as caught:
        Session.replay(path)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"[]", b"{}", b'{"traceEvents": []}', b"\xff"])
def test_a_file_that_is_not_ours_is_called_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert "is no run of ddp_notebook" in refusal(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none.json")
    assert "is no file" in refusal(tmp_path)
    assert "is no file" in refusal(Path("/dev/zero"))


def test_a_file_of_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    wire = whole(job())
    wire[KEY]["version"] = VERSION + 1
    said = refusal(written(tmp_path, wire))
    assert "newer ddp_notebook" in said
    assert "pip install -U ddp-notebook" in said


@pytest.mark.parametrize("version", [None, "1", 0, True])
def test_a_file_without_a_version_is_damaged(tmp_path: Path, version: Any) -> None:
    wire = whole(job())
    wire[KEY]["version"] = version
    assert "no version" in refusal(written(tmp_path, wire))


@pytest.mark.parametrize("part", [0.01, 0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, part: float) -> None:
    path = tmp_path / "run.json"
    write(path, job(), force=False)
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * part)])
    assert "is damaged" in refusal(path)


def places(wire: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in a JSON value."""
    if isinstance(wire, dict):
        items: Any = wire.items()
    elif isinstance(wire, list):
        items = enumerate(wire)
    else:
        return [at]
    return [at, *(found for key, each in items for found in places(each, (*at, key)))]


WIRE = encode_run(job())
PLACES = [place for place in places(WIRE) if place and place[0] not in ("format", "version")]


@given(
    st.sampled_from(PLACES),
    st.sampled_from([None, -7, 99, 1.5, "x", [], {}, [1], {"a": 1}, True, "gone"]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_changed_in_a_file_it_is_replayed_or_refused_in_words(
    place: tuple[Any, ...], value: Any
) -> None:
    wire = copy.deepcopy(WIRE)
    holder = wire
    for key in place[:-1]:
        holder = holder[key]
    if value == "gone":
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    try:
        replay = Replay(decode_run(wire))
    except DecodeError:
        return
    replay.status()
    replay.at(0.3)
    replay.trace()
    assert replay.about
    try:
        replay.why()
        replay.where()
    except DDPError:
        pass


def test_escape_codes_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    saved = replace(job(), versions={"torch": "2.\x1b]0;title\x07\x1b[2J13\x9b\ud800"})
    replay = Session.replay(written(tmp_path, whole(saved)))
    assert "with torch 2.13" in replay.about
    assert replay.about.isprintable()
    assert repr(replay).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "-" * 100_000 + "1",
        "not " * 50_000 + "x",
        "a" + ".b" * 50_000,
        "1" + "+1" * 50_000,
        "if x:\n    pass\n" + "elif x:\n    pass\n" * 20_000,
        "f = " + "lambda: " * 5_000 + "1",
        "if '%9999999999d' % rank:\n    pass",
    ],
    ids=lambda source: source[:6],
)
def test_code_that_no_person_wrote_is_not_looked_at(source: str) -> None:
    saved = job()
    assert saved.case is not None
    case = replace(saved.case, sources={"train.py": "\n" * 8 + source})
    assert [f.ranks for f in Replay(replace(saved, case=case)).why().findings] == [(1,)]


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 30, "9" * 6000, "-1e400"])
@pytest.mark.parametrize("name", ["wall_ns", "taken_ns"])
def test_a_time_that_no_clock_has_is_damage(tmp_path: Path, number: str, name: str) -> None:
    saved = replace(
        job(), wall_ns=987_654_321, snapshot=replace(job().snapshot, taken_ns=987_654_321)
    )
    text = json.dumps(whole(saved))
    path = tmp_path / "run.json"
    path.write_text(text.replace(f'"{name}": 987654321', f'"{name}": {number}'))
    assert "is damaged" in refusal(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    for name in ("run\0.json", "half \ud800", "~nobody-of-that-name/run.json"):
        assert "cannot be the name of a file" in refusal(Path(name))
    assert "cannot be read: File name too long" in refusal(Path("x" * 5000))


def test_a_file_that_is_too_large_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    assert "is too large: it has 100 MiB, and a saved run has at most 64 MiB" in refusal(path)


# --------------------------------------------------------------------------- looking


def test_the_board_can_be_seen_at_any_time() -> None:
    replay = Replay(job(), "run.json")
    assert replay.duration_s == pytest.approx(0.99)
    assert replay.at(0.05).headline == "2 ranks, gloo: starting"
    assert replay.at(0.25).headline == "2 ranks, gloo: setting up"
    assert replay.at(-0.65).headline == "2 ranks, gloo: ready"
    assert replay.at(5) == replay.status()
    assert replay.at(-60) == replay.at(0)


def test_why_is_found_by_the_rules_and_not_read() -> None:
    replay = Replay(job())
    assert replay.saved.diagnosis is None
    assert [finding.ranks for finding in replay.why().findings] == [(1,)]


def test_where_is_the_place_in_the_users_code() -> None:
    assert {r: str(path[-1]) for r, path in Replay(job()).where().items()} == {
        0: "train.py, line 10"
    }


# --------------------------------------------------------------------------- writing


@pytest.fixture
def session() -> Session:
    """A session that knows of two ranks, one of which died, without any process."""
    made = Session()
    made.record.begin(2, backend="gloo")
    made.record.add(
        (
            RankSpawned(rank=0, pid=1, device="cpu"),
            RankSpawned(rank=1, pid=2, device="cpu"),
            Output(rank=0, cell=1, what=OutputKind.STDOUT, text="a password\n"),
            RankExited(rank=1, pid=2, exit_code=-9, last_words="a password\nstep 7\n"),
        )
    )
    return made


def test_a_session_without_ranks_left_keeps_its_board(session: Session, tmp_path: Path) -> None:
    saved = session.save(tmp_path / "run.json")
    replay = Session.replay(tmp_path / "run.json")
    assert replay.saved == saved
    assert replay.status().rows[1].text == "killed by SIGKILL · last words: step 7"
    with pytest.raises(UsageMistake, match="no rank was left to ask"):
        replay.why()


def test_without_output_there_is_none_to_show(session: Session, tmp_path: Path) -> None:
    session.save(tmp_path / "run.json")
    with pytest.raises(UsageMistake, match="no output of rank 0"):
        Session.replay(tmp_path / "run.json").output(0)


def test_only_this_user_can_read_it_and_nothing_lies_beside_it(
    session: Session, tmp_path: Path
) -> None:
    session.save(tmp_path / "run.json")
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_ranks_wrote_is_kept_only_when_it_is_asked_for(
    session: Session, tmp_path: Path
) -> None:
    session.save(tmp_path / "without.json")
    session.save(tmp_path / "with.json", output=True)
    assert "a password" not in (tmp_path / "without.json").read_text()
    assert Session.replay(tmp_path / "with.json").output(0) == "a password\n"


def test_a_file_that_exists_is_replaced_only_by_force(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("mine")
    with pytest.raises(UsageMistake, match=r"exists already.*--force"):
        session.save(path)
    assert path.read_text() == "mine"
    session.save(path, force=True)
    assert Session.replay(path).saved.world_size == 2


def test_a_file_made_meanwhile_is_not_replaced(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setattr("os.fsync", lambda _: path.write_text("mine"))
    with pytest.raises(UsageMistake, match="exists already"):
        session.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_a_disk_that_is_full_leaves_what_was_there(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    path = tmp_path / "run.json"
    if force:
        path.write_text("mine")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageMistake, match="cannot be written: No space left on device"):
        session.save(path, force=force)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"] * force


def test_a_place_where_nothing_can_be_written_is_said(session: Session, tmp_path: Path) -> None:
    with pytest.raises(UsageMistake, match="is a folder"):
        session.save(tmp_path)
    with pytest.raises(UsageMistake, match=r"does not exist\. Create it"):
        session.save(tmp_path / "none" / "run.json")


def test_without_ranks_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(NoSession):
        Session().save(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


def test_a_file_without_collectives_says_why() -> None:
    assert what_is_missing(job()) == []
    (said,) = what_is_missing(replace(job(), case=None))
    assert said.startswith("not in it: collectives. ") and "%ddp_restart" in said


def test_reports_of_a_file_of_version_1_are_read_each_fact_where_it_is_now() -> None:
    now = encode_run(job())
    before = json.loads(json.dumps(now, allow_nan=False))
    before["version"] = 1
    for wire in before["case"]["ranks"]:
        values = {name: wire[group].get(field) for name, (group, field) in GROUPED.items()}
        for group, _ in GROUPED.values():
            wire.pop(group, None)
        wire |= {name: value for name, value in values.items() if value is not None}
    assert "error_text" in before["case"]["ranks"][0]
    assert decode_run(before).case == decode_run(json.loads(json.dumps(now))).case
    before["case"]["ranks"][0]["error_text"] = 7
    with pytest.raises(DecodeError, match=r"error\.text"):
        decode_run(before)
