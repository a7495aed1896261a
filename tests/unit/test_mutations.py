"""Whatever stands in a log, an event, a saved run or a baseline: no raw error, and all goes on.

`hostile` says how often each is tried.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import bench_run
from hostile import as_json, changed, changes, often, sendable, within
from hypothesis import given
from hypothesis import strategies as st
from saved_runs import job

from ddp_notebook.archive.format import KEY, encode_run
from ddp_notebook.archive.replay import Replay
from ddp_notebook.bench.plan import Plan
from ddp_notebook.board import still_picture
from ddp_notebook.board.replay_board import past_message
from ddp_notebook.board.still_picture import drawings
from ddp_notebook.board.timeline import Moment, Timeline
from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Case,
    CellFinished,
    CellStarted,
    Output,
    OutputKind,
    Progress,
    Pulse,
    RankExited,
    RankReport,
    RankSpawned,
    Snapshot,
    Stage,
    StageFailed,
    StageFinished,
    StageStarted,
    codec,
    collective_log,
    decode_events,
)
from ddp_notebook.session import BenchResult
from ddp_notebook.session.collective_logs import CollectiveLogs
from ddp_notebook.session.record import Record
from ddp_notebook.views.bench import table_html, table_text, title
from ddp_notebook.views.board_rows import board
from ddp_notebook.views.notebook import mime_bundle

pytestmark = within

SOURCE = "for step in range(3):\n    if rank == 0 and step % 2:\n" + "        x = 1\n" * 12

# --------------------------------------------------------------------------- saved runs


def _saved() -> Any:
    saved = job(4)
    assert saved.case is not None
    case = replace(saved.case, sources={"train.py": SOURCE, "cell 5": SOURCE})
    output = Output(rank=0, cell=5, what=OutputKind.STDOUT, text="step 1\n", heard_ns=1)
    return encode_run(
        replace(saved, case=case, versions={"torch": "2.13.0"}, outputs=(output,), script="a.py")
    )


RUN = _saved()


@given(changes({k: v for k, v in RUN.items() if k not in ("format", "version")}))
@often
def test_a_saved_run_is_replayed_or_refused_in_words(
    tmp_path: Path, made: list[tuple[Any, ...]]
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(as_json({"traceEvents": [], KEY: changed(RUN, made)}))
    try:
        replay = Replay.read(path)
    except UsageMistake as refused:
        assert str(refused).endswith(".")
        return
    about = f"{replay.about}{replay!r}"
    assert "\x1b" not in about
    sendable(about)
    sendable(mime_bundle(replay.status()))
    sendable(mime_bundle(replay.at(0.3)))
    replay.trace()
    timeline = Timeline(replay.saved.began_ns, replay.saved.world_size)
    records = [each for of in replay.saved.collectives.of.values() for each in of]
    timeline.take(replay.saved.run or 1, records)
    timeline.end(replay.saved.left_ns)
    sendable(still_picture.html(replay.status(), timeline=timeline))
    question = {"kind": "at", "at": 500, "view": ""}
    collectives = replay.collectives
    sendable(past_message(question, replay.saved.snapshot, collectives, Moment(), 0))
    try:
        sendable(mime_bundle(replay.why()))
        replay.where()
        replay.output(0)
    except UsageMistake:
        pass


# --------------------------------------------------------------------------- events


_EVENTS = [
    RankSpawned(rank=0, pid=7, device="cpu"),
    StageFinished(rank=0, stage=Stage.LAUNCHED, pid=7, host="here", seq=1),
    StageStarted(rank=0, stage=Stage.VERIFIED, waiting_for="all", seq=2),
    StageFinished(rank=0, stage=Stage.VERIFIED, detail="gave 3", seq=3),
    CellStarted(rank=0, cell=1, number=1, seq=4),
    Output(rank=0, cell=1, what=OutputKind.STDOUT, text="hello\n", data={"text/plain": "x"}, seq=5),
    Progress(rank=0, task="bench", done=1, total=2, value={"time": 1.0}, seq=6),
    Pulse(rank=0, doing="cell 1, line 2", cell=1, seq=7),
    CellFinished(rank=0, cell=1, outcome="error", ename="E", evalue="no", line=2, seq=8),
    StageFailed(rank=1, stage=Stage.VERIFIED, cause="no", remedy="yes", seq=1),
    RankExited(rank=1, pid=8, exit_code=-9, last_words="bye"),
]
EVENTS = [codec.encode(event) for event in _EVENTS]


@given(changes(EVENTS))
@often
def test_an_event_is_taken_in_or_passed_over_and_the_next_is_heard(
    made: list[tuple[Any, ...]],
) -> None:
    record = Record()
    record.begin(2)
    try:
        record.add(decode_events(as_json(changed(EVENTS, made)), 5))
    except codec.DecodeError:
        return
    sendable(mime_bundle(board(record.snapshot)))
    record.kept()
    record.add(decode_events(as_json([codec.encode(Pulse(rank=1, doing="on", seq=99))]), 9))
    assert record.snapshot.ranks[1].heard_ns == 9 or record.snapshot.ranks[1].exit_code is not None


# --------------------------------------------------------------------------- logs

TEXTS = [
    b'"all_reduce"',
    b'[["train.py", 3, "step", "dist.all_reduce(x)"]]',
    b'"float32"',
    b'{"group": "default", "members": [0, 1]}',
    b'"sum"',
]
RECORDS = 12


def _log(rank: int) -> bytearray:
    data = bytearray(collective_log.FILE_BYTES)
    text = b"".join(line + b"\n" for line in TEXTS)
    data[collective_log.TEXTS_FROM : collective_log.TEXTS_FROM + len(text)] = text
    collective_log.HEADER.pack_into(data, 0, collective_log.MAGIC, 1, RECORDS - rank, len(text))
    for number in range(RECORDS - rank):
        at = collective_log.RECORDS_FROM + number * collective_log.RECORD_BYTES
        collective_log.HEAD.pack_into(data, at, number + 1, number, 10**9 + number, 0, 0)
        rest = (6, 24, 2, 1, 0, 4, 1, 3, 5, 0, 0, 1, 0, 1, -1, -1, 0, *(6, *(0,) * 7), 0, 0)
        collective_log.REST.pack_into(data, at + collective_log.HEAD.size, *rest)
    return data


LOGS = [bytes(_log(rank)) for rank in range(2)]
USED = (
    *range(collective_log.HEADER.size),
    *range(collective_log.RECORDS_FROM, collective_log.RECORDS_FROM + RECORDS * 144),
    *range(collective_log.TEXTS_FROM, collective_log.TEXTS_FROM + sum(map(len, TEXTS)) + 5),
)
STRAY = st.binary(min_size=1, max_size=16) | st.sampled_from(
    [b"[" * 40, b'{"group": []', b"[1]", b"\n\n", b"\xff" * 8, b"\x7f" * 8, b'"\\ud800"', b"1" * 30]
)


@pytest.fixture(scope="module")
def logs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for rank in range(2):
        (folder / f"ring-{rank}").write_bytes(LOGS[rank])
    return folder


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(USED), STRAY), max_size=4))
@often
def test_a_log_that_something_wrote_over_is_read_and_judged(
    logs_folder: Path, written: list[tuple[int, int, bytes]]
) -> None:
    files = [logs_folder / f"ring-{rank}" for rank in range(2)]
    for rank, at, stray in written:
        put(files[rank], at, stray)
    logs = CollectiveLogs(logs_folder)
    try:
        logs.written((0, 1))
        collectives = logs.read((0, 1))
        logs.read_since((0, 1), 1, {0: 3}, 100)
        case = Case((RankReport(0), RankReport(1)), collectives=collectives)
        sendable(mime_bundle(diagnose_run(case)))
        timeline = Timeline(0, 2)
        timeline.take(1, [record for of in collectives.of.values() for record in of])
        sendable(timeline.whole())
        sendable([*drawings(timeline, [(0,), (1,)]).of_rows])
        past_message({"at": 1}, Snapshot(), collectives, Moment(), 0)
    finally:
        logs.close()
        for rank, at, stray in written:
            put(files[rank], at, LOGS[rank][at : at + len(stray)])


def put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


# --------------------------------------------------------------------------- baselines

NOW = bench_run(Plan(factor=4))
BASELINE = json.loads(BenchResult.of(NOW).to_json())
BASELINE_RUN = {"run": BASELINE["run"]}


@given(changes(BASELINE_RUN))
@often
def test_a_baseline_is_shown_or_refused_in_words(
    tmp_path: Path, made: list[tuple[Any, ...]]
) -> None:
    path = tmp_path / "before.json"
    path.write_bytes(as_json({**BASELINE, **changed(BASELINE_RUN, made)}))
    try:
        before = BenchResult.read(path)
    except UsageMistake:
        return
    result = BenchResult.of(NOW, before)
    for run, beside in ((result, result.baseline), (before, None)):
        sendable([table_text(run, beside), table_html(run, beside), title(run)])
