"""Whatever a saved run or a benchmark of others says, nothing of it is markup when it is shown."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hostile import as_json, changed, places
from pages import Page
from test_bench_views import RUN as CURVES
from test_doctor_report import REPORT
from test_mesh_layout import layout
from test_mutations import BASELINE, BASELINE_RUN, NOW, RUN
from test_step_views import RESULT
from test_variable_table import number, table, tensor
from test_views_findings import HELD_BACK

from ddp_notebook.archive.format import KEY
from ddp_notebook.archive.replay import Replay
from ddp_notebook.board import still_picture
from ddp_notebook.board.timeline import Timeline
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs.target import stack_of
from ddp_notebook.model import Case, OutputGroup, OutputItem, OutputKind
from ddp_notebook.session import BenchResult
from ddp_notebook.views import doctor, mesh, step_table, variables
from ddp_notebook.views.bench import live as live_bundle
from ddp_notebook.views.bench import live_steps, steps_html, table_html
from ddp_notebook.views.notebook import mime_bundle
from ddp_notebook.views.output import live
from ddp_notebook.views.stack_tree import merge

EVIL = "</td></title></style></pre></script><script>alert('1')</script>\"' onload=a()><img src=x>"
ADDRESS = re.compile(r"(data:image/|https://|#)")


def texts_of(wire: Any) -> Iterator[tuple[Any, ...]]:
    """A place of each kind of text in a JSON value."""
    seen = set()
    for place in places(wire):
        there = wire
        for key in place:
            there = there[key]
        kind = tuple(key for key in place if not isinstance(key, int))
        if isinstance(there, str) and kind not in seen:
            seen.add(kind)
            yield place


def timeline_of(replay: Replay) -> str:
    timeline = Timeline(replay.saved.began_ns, replay.saved.world_size)
    records = [each for of in replay.saved.collectives.of.values() for each in of]
    timeline.take(replay.saved.run or 1, records)
    timeline.end(replay.saved.left_ns)
    board = replay.status()
    return still_picture.html(board, replay.saved.diagnosis, timeline=timeline)


FORMS: dict[str, Callable[[Replay], Any]] = {
    "board": lambda replay: replay.status(),
    "board of a moment": lambda replay: replay.at(0.3),
    "diagnosis": lambda replay: replay.why(),
    "stacks": lambda replay: merge(
        [stack_of(e, over=True) for e in (replay.saved.case or Case(())).ranks],
        replay.saved.world_size,
    ),
    "output": lambda replay: live(
        [OutputGroup((0,), (OutputItem(OutputKind.STDOUT, replay.output(0)),))], "", ""
    ),
    "picture": timeline_of,
}


def no_markup(html: str) -> None:
    page = Page(html)
    assert page.unclosed == []
    assert not {"script", "iframe", "object", "embed", "link", "meta", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        assert name not in ("href", "src", "action") or ADDRESS.match(value or ""), value


@pytest.mark.parametrize("form", FORMS)
def test_no_text_of_a_saved_run_is_markup(form: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    shown = 0
    run = {name: value for name, value in RUN.items() if name not in ("format", "version")}
    for place in texts_of(run):
        path.write_bytes(as_json({KEY: changed(RUN, [(place, "set", EVIL)])}))
        with contextlib.suppress(UsageMistake):
            made = FORMS[form](Replay.read(path))
            html = made if isinstance(made, str) else mime_bundle(made)["text/html"]
            no_markup(html)
            shown += EVIL.partition("'")[0] in Page(html).text
    assert shown, "none of it was shown: this would pass without a check"


def test_no_text_of_a_benchmark_is_markup(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    shown = 0
    for place in texts_of(BASELINE_RUN):
        wire = {**BASELINE, **changed(BASELINE_RUN, [(place, "set", EVIL)])}
        path.write_bytes(as_json(wire))
        with contextlib.suppress(UsageMistake):
            before = BenchResult.read(path)
            result = BenchResult.of(NOW, before)
            for html in (table_html(before), table_html(result, result.baseline)):
                no_markup(html)
                shown += EVIL.partition("'")[0] in Page(html).text
    assert shown, "none of it was shown: this would pass without a check"


def with_evil(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """`value` with one text in it replaced, for each; also where it is a name in a mapping."""
    if type(value) is str:
        yield at, EVIL
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for place, own in with_evil(getattr(value, field.name), (*at, field.name)):
                yield place, dataclasses.replace(value, **{field.name: own})
    elif type(value) is tuple:
        for index, each in enumerate(value):
            for place, own in with_evil(each, at):
                yield place, (*value[:index], own, *value[index + 1 :])
    elif isinstance(value, Mapping):
        for key, each in value.items():
            for place, own in with_evil(each, at):
                yield place, {**value, key: own}
            if type(key) is str:
                yield (*at, "name"), {EVIL if k == key else k: v for k, v in value.items()}


VALUES: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "variables": (
        table((number(1.0), tensor(1.0, digest="d")), (number(2.0), tensor(2.0, digest="e"))),
        variables.html,
    ),
    "doctor": (REPORT, doctor.html),
    "steps": (HELD_BACK, step_table.html),
    "mesh": (layout(), mesh.html),
    "training steps": (RESULT, steps_html),
    "picture of training steps": (
        RESULT,
        lambda result: live_steps(result.model, result, 0.5, 3.0)["text/html"],
    ),
    "picture of a benchmark": (
        CURVES,
        lambda run: live_bundle(run, 0.5, 3.0)["text/html"],
    ),
}


@pytest.mark.parametrize("shown_as", VALUES)
def test_no_text_of_a_value_is_markup(shown_as: str) -> None:
    value, html_of = VALUES[shown_as]
    seen, shown = set(), 0
    for place, evil in with_evil(value):
        if place not in seen:
            seen.add(place)
            with contextlib.suppress(KeyError, ValueError):  # a word of ours, which names a case
                html = html_of(evil)
                no_markup(html)
                shown += EVIL.partition("'")[0] in Page(html).text
    assert shown, "none of it was shown: this would pass without a check"
