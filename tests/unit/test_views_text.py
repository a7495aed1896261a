"""The board and the ranks' output as plain text, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.model import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    OutputKind,
    Snapshot,
    Stage,
    Status,
    format_ranks,
)
from ddp_notebook.views import board, output


def row(
    ranks: Iterable[int],
    status: Status = Status.READY,
    stage: Stage | None = Stage.VERIFIED,
    entering: Stage | None = None,
    doing: str = "",
    *,
    device: str = "cpu",
    pid: int = 0,
    host: str = "node-17",
    age_s: float = 0.1,
    silent: bool = False,
) -> BoardRow:
    """A row of ranks that are set up and ready, unless said otherwise."""
    return BoardRow(tuple(ranks), status, stage, entering, doing, device, pid, host, age_s, silent)


def drawn(*rows: BoardRow, headline: str = "A headline", notes: tuple[str, ...] = ()) -> str:
    """The board of `rows`, with a newline at its end."""
    return board.text(Board(headline, rows, notes, Snapshot())) + "\n"


def stream(words: str, what: OutputKind = OutputKind.STDOUT) -> OutputItem:
    return OutputItem(what, words)


def display(**data: str) -> OutputItem:
    """A display; ``text_plain`` stands for ``text/plain``."""
    return OutputItem(
        OutputKind.DISPLAY, data={k.replace("_", "/"): value for k, value in data.items()}
    )


# --------------------------------------------------------------------------- board


def test_a_healthy_board_folded_into_one_row() -> None:
    table = drawn(
        row(range(4)),
        headline="4 ranks, gloo · tcp://127.0.0.1:41234: ready",
        notes=("gloo on the CPU: this machine has no GPU.",),
    )
    assert table == dedent("""\
        4 ranks, gloo · tcp://127.0.0.1:41234: ready

        ranks  stage         state  device  host     last seen
        ─────  ────────────  ─────  ──────  ───────  ─────────
        0-3    6/6 verified  ready  cpu     node-17  now

        • gloo on the CPU: this machine has no GPU.
        """)


def test_set_up_in_progress_with_ranks_in_different_stages() -> None:
    table = drawn(
        row([0], pid=4711),
        row([1], Status.SETTING_UP, Stage.PROCESS_GROUP, Stage.VERIFIED, pid=4712),
        row([2], Status.SETTING_UP, Stage.STORE, Stage.RENDEZVOUS, "waits for rank 3", pid=4713),
        row(
            [3], Status.STARTING, None, None, "its process is starting", pid=4714, host="", age_s=0
        ),
        headline="4 ranks, gloo: setting up",
    )
    assert table == dedent("""\
        4 ranks, gloo: setting up

        ranks  stage                    state       doing                    device  pid   host     last seen
        ─────  ───────────────────────  ──────────  ───────────────────────  ──────  ────  ───────  ─────────
        0      6/6 verified             ready                                cpu     4711  node-17  now
        1      6/6 verifying…           setting up                           cpu     4712  node-17  now
        2      4/6 joining rendezvous…  setting up  waits for rank 3         cpu     4713  node-17  now
        3      0/6 not launched         starting    its process is starting  cpu     4714           not yet
        """)  # noqa: E501


def test_a_dead_rank_with_last_words_of_which_the_first_lines_are_shown() -> None:
    last_words = (
        "killed by SIGKILL · last words: terminate called after throwing an instance of "
        "'gloo::EnforceNotMet' what(): [enforce fail at pair.cc:446] op.preamble.length <= "
        "op.nbytes. 8192 vs 4096, while the other ranks wait in all_reduce"
    )
    table = drawn(
        row([0, 1, 3], Status.RUNNING, doing="all_reduce (cell 7, line 12)"),
        row([2], Status.DEAD, doing=last_words, pid=5120, age_s=12.4),
        headline="4 ranks, gloo: ranks 0, 1 and 3 running; rank 2 dead",
        notes=("Rank 2 can be brought back: %ddp_restart --ranks 2",),
    )
    assert table == dedent("""\
        4 ranks, gloo: ranks 0, 1 and 3 running; rank 2 dead

        ranks  stage         state    doing                                                   device  pid   host     last seen
        ─────  ────────────  ───────  ──────────────────────────────────────────────────────  ──────  ────  ───────  ─────────
        0-1,3  6/6 verified  running  all_reduce (cell 7, line 12)                            cpu           node-17  now
        2      6/6 verified  dead     killed by SIGKILL · last words: terminate called after  cpu     5120  node-17  12 s
                                      throwing an instance of 'gloo::EnforceNotMet' what():
                                      [enforce fail at pair.cc:446] op.preamble.length <= …

        • Rank 2 can be brought back: %ddp_restart --ranks 2
        """)  # noqa: E501


def test_sixty_four_ranks_are_three_rows() -> None:
    table = drawn(
        row(range(3), device="cuda"),
        row([3], Status.RUNNING, doing="matmul (cell 12, line 3)", device="cuda:3", pid=881),
        row(range(4, 64), Status.RUNNING, doing="all_reduce (cell 12, line 4)", device="cuda"),
        headline="64 ranks, nccl: ranks 0-2 ready; ranks 3-63 running",
    )
    assert table == dedent("""\
        64 ranks, nccl: ranks 0-2 ready; ranks 3-63 running

        ranks  stage         state    doing                         device  pid  host     last seen
        ─────  ────────────  ───────  ────────────────────────────  ──────  ───  ───────  ─────────
        0-2    6/6 verified  ready                                  cuda         node-17  now
        3      6/6 verified  running  matmul (cell 12, line 3)      cuda:3  881  node-17  now
        4-63   6/6 verified  running  all_reduce (cell 12, line 4)  cuda         node-17  now
        """)


def test_a_silent_rank_is_said_to_be_silent() -> None:
    table = drawn(
        row([0], Status.RUNNING, doing="cell 3"),
        row([1], Status.RUNNING, doing="cell 3", age_s=31.2, silent=True),
    )
    assert table == dedent("""\
        A headline

        ranks  stage         state    doing   device  host     last seen
        ─────  ────────────  ───────  ──────  ──────  ───────  ───────────
        0      6/6 verified  running  cell 3  cpu     node-17  now
        1      6/6 verified  running  cell 3  cpu     node-17  silent 31 s
        """)


def test_a_rank_that_failed_in_a_stage_is_no_longer_in_it() -> None:
    failed = row([1], Status.FAILED, Stage.ENVIRONMENT, Stage.STORE)
    assert board.stage_words(failed) == "3/6 reaching store"


def test_ranks_that_set_up_once_more_have_only_the_new_stages_behind_them() -> None:
    again = row([1], Status.SETTING_UP, Stage.VERIFIED, Stage.STORE)
    assert again.stages_passed == 2
    assert board.stage_words(again) == "3/6 reaching store…"


def test_no_ranks_are_a_headline_without_a_table() -> None:
    assert drawn(headline="No ranks.") == "No ranks.\n"


def test_ranks_that_do_not_follow_each_other_are_all_named_on_several_lines() -> None:
    lines = drawn(row(range(0, 64, 2))).splitlines()
    named = "".join(line.split()[0] for line in lines[4:])
    assert named == format_ranks(range(0, 64, 2))
    assert max(map(len, lines)) <= 80


def test_a_note_of_several_lines_is_indented_below_its_bullet() -> None:
    notes = drawn(notes=("The port is taken.\nType %ddp_init", "Second"))
    assert notes == "A headline\n\n• The port is taken.\n  Type %ddp_init\n• Second\n"


def test_escape_codes_and_line_ends_do_not_break_the_table() -> None:
    table = drawn(row([0], Status.DEAD, doing="\x1b[31mRuntimeError\x1b[0m:\n  no\r\tgood\x07"))
    assert "RuntimeError: no good" in table
    assert "\x1b" not in table
    assert len(table.splitlines()) == 5


@pytest.mark.parametrize(
    ("age_s", "words"),
    [
        (0, "now"),
        (0.99, "now"),
        (1.2, "1 s"),
        (9.6, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (7160, "119 min"),
        (7199, "2 h"),
    ],
)
def test_an_age_is_as_precise_as_it_matters(age_s: float, words: str) -> None:
    assert board.heard_words(row([0], age_s=age_s)) == words
    assert board.heard_words(row([0], age_s=age_s, silent=True)) == f"silent {words}".replace(
        "now", "< 1 s"
    )


@given(
    ranks=st.lists(st.integers(0, 127), min_size=1, unique=True),
    entering=st.sampled_from([None, *Stage]),
    doing=st.text(),
    device=st.text(),
    host=st.text(),
    age_s=st.floats(0, 1e5),
    silent=st.booleans(),
)
def test_whatever_the_ranks_say_the_board_is_at_most_120_columns_wide(
    ranks: list[int],
    entering: Stage | None,
    doing: str,
    device: str,
    host: str,
    age_s: float,
    silent: bool,
) -> None:
    table = drawn(
        row(
            ranks,
            Status.SETTING_UP,
            entering=entering,
            doing=doing,
            device=device[:8],
            host=host[:12],
            age_s=age_s,
            silent=silent,
        ),
    )
    assert all(len(line) <= 120 for line in table.splitlines())


# --------------------------------------------------------------------------- output


def test_output_stands_below_the_ranks_it_came_from() -> None:
    same = OutputGroup((0, 1, 2, 3), (stream("epoch 1\n"), stream("epoch 2\n")))
    other = OutputGroup((2,), (stream("only I", OutputKind.STDERR),))
    assert output.outputs([same, other]) == dedent("""\
        ── ranks 0-3 ──
        epoch 1
        epoch 2

        ── rank 2 ──
        only I""")


def test_streams_go_on_in_the_line_and_displays_begin_a_new_one() -> None:
    items = (
        stream("loss "),
        stream("0.5", OutputKind.STDERR),
        display(text_plain="<Figure size 640x480>", image_png="iVBORw0="),
        OutputItem(OutputKind.RESULT, data={"text/plain": "42"}),
        display(image_png="iVBORw0=", image_svg="<svg>"),
        stream("end\n"),
    )
    assert output.outputs([OutputGroup((0,), items)]) == dedent("""\
        ── rank 0 ──
        loss 0.5
        <Figure size 640x480>
        42
        (display: image/png, image/svg)
        end""")


def test_a_traceback_is_shown_without_its_colours() -> None:
    error = OutputItem(OutputKind.ERROR, "\x1b[31mValueError\x1b[39m: no")
    assert output.outputs([OutputGroup((1,), (error,))]) == "── rank 1 ──\nValueError: no"


def test_an_open_progress_bar_leaves_no_carriage_return() -> None:
    bar = OutputGroup((0,), (stream(" 50%|###   |\r", OutputKind.STDERR),))
    assert output.outputs([bar]) == "── rank 0 ──\n 50%|###   |"


def test_ranks_without_output_are_said_to_have_none() -> None:
    assert output.outputs([OutputGroup((0, 1), ())]) == "── ranks 0 and 1 ──\n(no output)"
    assert output.outputs([]) == ""
