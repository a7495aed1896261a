"""The ranks' output: what each wrote, and which ranks wrote the same."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ddp_notebook.model import Output, OutputItem, OutputKind
from ddp_notebook.views.output_log import (
    OutputLog,
    apply_carriage_returns,
    bars_apart,
    group,
    group_live,
    resumable,
    split_errors,
)

OUT, ERR = OutputKind.STDOUT, OutputKind.STDERR


def wrote(*texts: str, what: OutputKind = OUT) -> tuple[OutputItem, ...]:
    log = OutputLog()
    for text in texts:
        log.add(Output(rank=0, cell=1, what=what, text=text))
    return log.items()


@given(st.lists(st.text(alphabet="ab\n"), max_size=20))
def test_text_written_in_pieces_is_one_item(pieces: list[str]) -> None:
    assert "".join(item.text for item in wrote(*pieces)) == "".join(pieces)
    assert len(wrote(*pieces)) <= 1


def test_stdout_and_stderr_keep_their_order() -> None:
    log = OutputLog()
    for what, text in ((OUT, "a"), (ERR, "b"), (OUT, "c"), (OUT, "d")):
        log.add(Output(rank=0, cell=1, what=what, text=text))
    assert [(item.what, item.text) for item in log.items()] == [(OUT, "a"), (ERR, "b"), (OUT, "cd")]


def test_a_progress_bar_leaves_its_last_state() -> None:
    assert wrote("\r 0%", "\r 50%", "\r100%\n")[0].text == "100%\n"


def test_a_carriage_return_overwrites_only_what_is_written_over() -> None:
    assert apply_carriage_returns("abcdef\rXY") == "XYcdef"
    assert apply_carriage_returns("one\r\ntwo") == "one\ntwo"


@example("aa\raa", 4)
@given(st.text(alphabet="ab\r\n"), st.integers(0, 20))
def test_carriage_returns_can_be_applied_as_text_comes(text: str, cut: int) -> None:
    whole = apply_carriage_returns(text)
    if text[:cut].endswith("\r") and text[cut : cut + 1] == "\n":
        cut += 1  # a line end is not cut in two
    assert apply_carriage_returns(resumable(text[:cut]) + text[cut:]) == whole


def test_a_display_is_updated_in_its_place() -> None:
    log = OutputLog()
    for value, update in (("1", False), ("2", True)):
        log.add(
            Output(
                rank=0,
                cell=1,
                what=OutputKind.DISPLAY,
                data={"text/plain": value},
                display_id="d",
                update=update,
            )
        )
        log.add(Output(rank=0, cell=1, what=OUT, text="x"))
    assert [item.data.get("text/plain", item.text) for item in log.items()] == ["2", "xx"]


def test_clearing_waits_for_what_comes_next_when_asked_to() -> None:
    log = OutputLog()
    log.add(Output(rank=0, cell=1, what=OUT, text="old"))
    log.add(Output(rank=0, cell=1, what=OutputKind.CLEAR, update=True))
    assert log.items()[0].text == "old"
    log.add(Output(rank=0, cell=1, what=OUT, text="new"))
    assert [item.text for item in log.items()] == ["new"]


def test_equal_output_is_shown_once_and_named_by_its_ranks() -> None:
    logs = {0: wrote("a"), 1: wrote("b"), 2: wrote("a"), 3: ()}
    assert [(g.ranks, g.items[0].text) for g in group(logs)] == [((0, 2), "a"), ((1,), "b")]


def test_objects_that_differ_only_in_their_address_are_equal_output() -> None:
    logs = {0: wrote("<Linear at 0x7f0011223344>"), 1: wrote("<Linear at 0x7f0099887766>")}
    assert [g.ranks for g in group(logs)] == [(0, 1)]


def raised(text: str) -> tuple[OutputItem, ...]:
    return (OutputItem(OutputKind.ERROR, text=text),)


def test_errors_that_differ_in_the_own_rank_alone_are_one() -> None:
    said = "no gradient on rank {}: 4 5"
    logs = {0: raised(said.format(0)), 1: raised("other"), 10: raised(said.format(10))}
    tracebacks, rest = split_errors(group(logs))
    assert [(g.ranks, g.items[0].text) for g in tracebacks] == [
        ((0, 10), "no gradient on rank N: 4 5"),
        ((1,), "other"),
    ]
    assert not rest


def test_lost_connections_are_one_error_whatever_the_ports() -> None:
    text = "Connection closed by peer [127.0.0.1]:{}"
    logs = {rank: raised(text.format(4000 + rank)) for rank in (0, 1, 3)}
    tracebacks, _ = split_errors(group(logs))
    assert [(g.ranks, g.items[0].text) for g in tracebacks] == [((0, 1, 3), text.format("PORT"))]
    (one,), _ = split_errors(group({0: raised(text.format(4000))}))
    assert one.items[0].text == text.format(4000), "of one rank it stays as it is"


def test_an_error_that_names_another_rank_keeps_its_words() -> None:
    logs = {rank: raised("rank 1 has gone, says rank 0") for rank in (0, 2)}
    logs[3] = raised("rank 3 has gone")
    tracebacks, _ = split_errors(group(logs))
    assert [(g.ranks, g.items[0].text) for g in tracebacks] == [
        ((0, 2), "rank 1 has gone, says rank 0"),
        ((3,), "rank 3 has gone"),
    ]


@given(st.dictionaries(st.integers(0, 9), st.text(alphabet="ab\n", min_size=1)))
def test_every_rank_is_in_one_group_with_its_own_text(texts: dict[int, str]) -> None:
    groups = group({rank: wrote(text) for rank, text in texts.items()})
    seen = {rank: g.items[0].text for g in groups for rank in g.ranks}
    assert seen == texts


def test_a_rank_that_is_only_behind_counts_as_equal_while_output_comes() -> None:
    logs = {0: wrote("step 1\nst"), 1: wrote("step 1\nstep 2\n"), 2: wrote("other")}
    groups = group_live(logs)
    assert [(g.ranks, g.items[0].text) for g in groups] == [
        ((0, 1), "step 1\nstep 2\n"),
        ((2,), "other"),
    ]


def test_each_distinct_traceback_comes_first_once_with_its_ranks() -> None:
    error = OutputItem(OutputKind.ERROR, text="ValueError: x")
    logs = {0: wrote("hi"), 1: (*wrote("hi"), error), 2: (*wrote("hi"), error)}
    tracebacks, rest = split_errors(group(logs))
    assert [(g.ranks, g.items[0].text) for g in tracebacks] == [((1, 2), "ValueError: x")]
    assert [(g.ranks, g.items[0].text) for g in rest] == [((0, 1, 2), "hi")]


# -- progress bars ---------------------------------------------------------------------------


def bar_log(*pieces: tuple[OutputKind, str]) -> list[OutputItem]:
    log = OutputLog()
    for what, text in pieces:
        log.add(Output(rank=0, cell=1, what=what, text=text))
        log.items()
    return list(log.items())


def test_bars_below_each_other_are_a_line_each_in_their_last_state() -> None:
    """tqdm moves the cursor up after an inner bar; a screen shows both, and so do we."""
    (item,) = bar_log(
        (ERR, "\r epoch:   0%|   | 0/2 [00:00<?]"),
        (ERR, "\n\r batch:   0%|   | 0/9 [00:00<?]\x1b[A"),
        (ERR, "\n\r batch: 100%|###| 9/9 [00:00<00:01]\x1b[A"),
        (ERR, "\r epoch:  50%|#  | 1/2 [00:01<00:01]"),
    )
    lines = [line.rstrip("\r") for line in item.text.split("\n")]
    assert lines == [
        " epoch:  50%|#  | 1/2 [00:01<00:01]",
        " batch: 100%|###| 9/9 [00:00<00:01]",
    ]


def test_a_bar_that_is_written_between_prints_stays_one_line() -> None:
    bar, out = bar_log(
        (ERR, "\r  0%|   | 0/2 [00:00<?]"),
        (OUT, "loss 1\n"),
        (ERR, "\r 50%|#  | 1/2 [00:00<00:01]\n"),  # and an inner bar begins
        (ERR, "\rinner:   0%|   | 0/5 [00:00<?]\x1b[A"),
        (ERR, "\n\r                                  \x1b[A"),
        (OUT, "loss 2\n"),
        (ERR, "\r100%|###| 2/2 [00:00<00:00]\n"),
    )
    assert bar.text.strip() == "100%|###| 2/2 [00:00<00:00]"
    assert out.text == "loss 1\nloss 2\n"


def test_a_warning_after_a_print_is_not_put_into_the_bar_above() -> None:
    items = bar_log((ERR, "\r  0%|   | 0/2 [00:00<?]"), (OUT, "loss 1\n"), (ERR, "Warning: low\n"))
    assert [item.text.strip() for item in items][1:] == ["loss 1", "Warning: low"]


def test_bars_are_no_stderr_and_warnings_between_them_are() -> None:
    item = OutputItem(ERR, "careful\n100%|###| 2/2 [00:00<00:00]\n3it [00:01, 2.9it/s]\nbad 50%\n")
    assert [(each.what, each.text) for each in bars_apart([item])] == [
        (ERR, "careful\n"),
        (OUT, "100%|###| 2/2 [00:00<00:00]\n3it [00:01, 2.9it/s]\n"),
        (ERR, "bad 50%\n"),
    ]
