"""What the tabs of the board show, as JSON: bounded, and with the lines that can be gone to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_notebook.board import tab_contents
from ddp_notebook.model import (
    Activity,
    Doing,
    Frame,
    LineStopped,
    OutputGroup,
    OutputItem,
    OutputKind,
    RankStack,
)
from ddp_notebook.rank.calls import Bound, Breakpoint
from ddp_notebook.session.runs.registry import PastRun
from ddp_notebook.session.tools.breakpoints import BreakpointRow
from ddp_notebook.views import stack_tree

STEP = Frame("cell 4", 3, "step", "dist.all_reduce(loss)")
TORCH = Frame("/x/torch/distributed.py", 900, "all_reduce", module="torch.d", library=True)


def stack(rank: int, text: str = "", *frames: Frame) -> RankStack:
    return RankStack(rank, Doing(Activity.FAILED if text else Activity.WAITING, "", text), frames)


def test_equal_stacks_are_one_class_whose_lines_can_be_gone_to() -> None:
    source = "%%ddp\ndef step(loss):\n    dist.all_reduce(loss)\nstep(1)"
    tree = stack_tree.merge([stack(r, "", STEP, TORCH) for r in (0, 2)] + [stack(1)], 3)
    both, alone = tab_contents.stack_json(tree, {"cell 4": source})["classes"]
    assert (both["ranks"], alone["ranks"]) == ("0,2", "1")
    frame, library = both["frames"]
    assert (frame["at"], frame["cell"], frame["line"]) == ("cell 4, line 3", 4, 3)
    assert frame["around"][2] == [3, "    dist.all_reduce(loss)"]
    assert library["library"] and library["around"] == []


def stop(rank: int, line: int, text: str, file: str = "cell 4") -> LineStopped:
    return LineStopped(
        rank=rank, cell=1, stop=1, file=file, line=line, function="f", first=line, source=(text,)
    )


def test_who_is_paused_where_is_shown_in_as_much_code_as_can_be_read() -> None:
    text = "\n" + "".join(f"x = {n}\n" for n in range(2, 200))
    stops = {r: stop(r, 50 + r // 3, f"x = {50 + r // 3}") for r in range(4)}
    bound = Bound(1, "<ddp cell 4>", 52)
    row = BreakpointRow(Breakpoint(1, file="<ddp cell 4>", line=52), {0: bound}, enabled=False)
    made = tab_contents.source_json("Paused", stops, {"cell 4": text}, [row])
    (file,) = made["files"]
    assert file["break"] == "%ddp_break 'cell 4':" and file["path"] == ""
    assert (file["lines"][0], file["lines"][-1]) == ([10, "x = 10"], [91, "x = 91"])
    assert [(at["line"], at["ranks"]) for at in file["at"]] == [(50, "0-2"), (51, "3")]
    (there,) = file["breakpoints"]
    assert (there["line"], there["number"], there["off"]) == (52, 1, True)


def test_of_code_that_changed_since_it_was_imported_the_ranks_lines_alone_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").write_text("edited = 1\n")
    file = str(tmp_path / "my train.py")
    stops = {0: stop(0, 1, "\tx = 1", file), 1: stop(1, 7, "y = 1", "<string>")}
    one, other = tab_contents.source_json("", stops, {file: "edited = 1\n"}, [])["files"]
    assert (one["name"], one["path"], one["lines"]) == ("my train.py", file, [[1, "    x = 1"]])
    assert one["break"] == "%ddp_break 'my train.py':"
    assert other["break"] == "", "there is no file to name"


def test_ranks_whose_errors_differ_in_their_own_number_alone_are_one_class() -> None:
    tree = stack_tree.merge([stack(r, f"Mismatch: rank {r} brings x", STEP) for r in (0, 1)], 2)
    (both,) = tab_contents.stack_json(tree, {})["classes"]
    assert both["ranks"] == "0-1" and "rank N brings x" in both["state"]


def test_of_much_output_the_end_is_kept_and_it_says_how_much_is_above() -> None:
    text = "".join(f"line {n} \x1b[31mred\x1b[0m\n" for n in range(50_000))
    group = OutputGroup((0, 1), (OutputItem(OutputKind.STDOUT, text),))
    made = tab_contents.console_json("cell 3", [group], {1: 10})
    (shown,) = made["groups"]
    assert shown["lines"][-1] == ["out", "line 49999 red"]
    assert len(shown["lines"]) == 400 and shown["left_out"] == 49_600
    assert "%ddp_output --ranks 1" in made["notes"][0]
    many = [OutputGroup((r,), group.items) for r in range(64)]
    assert len(json.dumps(tab_contents.console_json("cell 3", many, {}))) < 200_000


def test_a_run_in_the_history_says_how_it_ended_and_what_was_found() -> None:
    good = PastRun("cell 3", 1, (0, 1), 0.0, 0.5, {"finished": (0, 1)})
    bad = PastRun("a.py", 2, (0, 1), 0.0, 2, {"raised": (1,)}, (0,), "Rank 1 raised", "x")
    first, second = tab_contents.history_json([good, bad])
    assert (first["title"], first["how"]) == ("a.py", "rank 1 raised, rank 0 in it")
    assert first["running"] and not first["ok"]
    assert (second["how"], second["ok"], second["us"]) == ("finished", True, 500_000)
