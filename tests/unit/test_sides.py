"""Where the ranks of a finding are: their lines, what they do there, and the line that decides."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

from collective_cases import same
from traces import all_reduce, backward, barrier, places, play, report

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Activity, Case, Collective, Finding, codec
from ddp_notebook.views import finding_code

VALIDATES = """\
correct = torch.zeros(1)
def validate(model):
    correct.fill_(1)
    dist.all_reduce(correct)


if rank == 0:
    print(validate(model))
dist.barrier()"""
TRAINS = """\
for (x,) in data:
    opt.zero_grad()
    model(x).sum().backward()
print("done")"""


def found(case: Case, code: str) -> Finding:
    texts = {"train.py": code}
    lines = code.splitlines()
    # Ranks report the text of their lines, too.
    of = {
        rank: tuple(
            replace(
                record,
                path=tuple(replace(at, text=lines[at.line - 1].strip()) for at in record.path),
            )
            for record in records
        )
        for rank, records in case.collectives.of.items()
    }
    case = replace(case, collectives=replace(case.collectives, of=of))
    return diagnose_run(case, texts).findings[0]


def conditional() -> Finding:
    alone = all_reduce(8, (4, "validate"))
    programs = same(4, [barrier(9)], r0=[alone, barrier(9)])
    return found(play(programs), VALIDATES)


def steps(count: int, line: int = 3) -> list[Collective]:
    """Backward passes of one line, each with two buckets."""
    bucket = backward(line)
    return [replace(bucket, backwards=n) for n in range(1, count + 1) for _ in range(2)]


def test_both_sides_are_at_their_call_and_the_users_function_leads_to_ours() -> None:
    finding = conditional()
    assert finding_code.text(finding) == dedent("""\
         --> train.py
          |
        7 | if rank == 0:  <- only rank 0 enters
        8 |     print(validate(model))
          |     ----------------------
          |     rank 0 waits in here: line 4, `dist.all_reduce(correct)`, collective 0
        9 | dist.barrier()
          | ^^^^^^^^^^^^^^ ranks 1-3 wait here, collective 0""")


def test_a_page_has_a_column_for_each_side_the_culprits_first() -> None:
    mine, theirs = finding_code.columns(conditional(), before=0)
    assert (mine.who, mine.at, mine.culprit) == ("rank 0", "train.py, line 4, in validate", True)
    assert [line.number for line in mine.lines] == [7, 8, 0, 4]
    assert [line.marks[0].label for line in mine.lines if line.marks] == [
        *("only rank 0 enters", "", "waits here, collective 0")
    ]
    assert (theirs.who, theirs.at, theirs.culprit) == ("ranks 1-3", "train.py, line 9", False)


def test_who_left_a_loop_is_shown_at_its_head_with_how_many_steps_it_made() -> None:
    finding = found(play(same(4, steps(9), r3=steps(8))), TRAINS)
    assert finding.ranks == (3,)
    assert (
        finding_code.text(finding)
        == dedent("""\
         --> train.py
          |
        1 | for (x,) in data:
          | ^^^^^^^^^^^^^^^^^ rank 3 left the loop here, after 8 steps
        2 |     opt.zero_grad()
        3 |     model(x).sum().backward()
          |     ^^^^^^^^^^^^^^^^^^^^^^^^^ ranks 0-2 wait here, gradient all_reduce, collective 16""")  # noqa: E501
    )


def test_ranks_at_one_line_are_told_apart_by_what_they_bring() -> None:
    code = "feats = torch.randn(8 if rank != 2 else 5)\nout = []\ndist.all_reduce(feats)"
    calls = [all_reduce(3, shape=(8,))]
    finding = found(play(same(3, calls, r2=[all_reduce(3, shape=(5,))])), code)
    assert finding_code.text(finding).splitlines()[2:] == [
        "1 | feats = torch.randn(8 if rank != 2 else 5)  <- `feats` depends on the rank",
        "2 | out = []",
        "3 | dist.all_reduce(feats)",
        "  | ^^^^^^^^^^^^^^^^^^^^^^ rank 2: float32 [5]   ranks 0 and 1: float32 [8]",
    ]
    (column,) = finding_code.columns(finding)
    assert column.who == "ranks 0-2", "they are at the same lines: one column"


def test_what_one_rank_raised_stands_beside_the_line_that_the_others_wait_at() -> None:
    code = "def load(d):\n    return d['x']\nif rank == 1:\n    load({})\ndist.barrier()"
    at = places(4, (2, "load"))
    failed = report(
        0, Activity.FAILED, error_type="KeyError", error_text="'x'", error_at=at, initialized=True
    )
    finding = found(play(same(3, [barrier(5)], r1=[]), {1: failed}), code)
    raised, waits = finding.sides
    assert (raised.state, raised.detail) == ("raised", ": KeyError: 'x'") and raised.path == at
    assert (waits.ranks, waits.state, waits.detail) == ((0, 2), "wait", ", collective 0")


def test_without_the_code_the_lines_that_are_known_are_shown_alone() -> None:
    case = play(same(3, [barrier(9)], r0=[all_reduce(4), barrier(9)]))
    finding = diagnose_run(case).findings[0]
    assert finding.code == () and len(finding.places) == 2
    assert "^ rank 0 waits here, all_reduce, collective 0" in finding_code.text(finding)


def test_a_finding_of_an_older_file_is_read_without_its_code() -> None:
    finding = conditional()
    wire = codec.encode(finding)
    assert codec.decode(Finding, wire) == finding
    old = {k: v for k, v in wire.items() if k not in ("decides", "code")}
    old["sides"] = [
        {k: v for k, v in side.items() if k not in ("path", "state", "detail")}
        for side in wire["sides"]
    ]
    read = codec.decode(Finding, old)
    assert read.code == () and read.decides is None
    assert "dist.barrier()" in finding_code.text(read)
