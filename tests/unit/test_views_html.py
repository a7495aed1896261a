"""The board and the live region as HTML: nothing a rank says becomes markup, all of it is there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import Page

from ddp_notebook.model import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    OutputKind,
    Snapshot,
    Stage,
    Status,
)
from ddp_notebook.views import board, output
from ddp_notebook.views.ansi import after_escape, ansi_to_html, strip_ansi

TABLE_TAGS = {"table", "thead", "tbody", "tr", "th", "td"}
BOARD_TAGS = {*TABLE_TAGS, "div", "style", "span", "i", "ul", "li", "wbr"}
LIVE_TAGS = {*BOARD_TAGS, "b", "pre", "img"}
ATTRIBUTES = {"class", "style", "title", "scope", "aria-hidden", "src", "alt"}

EVIL = "</td></style></pre><script>alert('1')</script>\"><img src=x onerror=a()>&lt;&amp;"
# Text with more escape codes, and more broken ones, than ranks write.
ANSI_PIECES = st.sampled_from(
    [
        *("\x1b[", "\x1b", "\x1b]8;;http://x\x07", "\x1b[1;31m", "\x1b[38;5;196m", "\x1b[0m"),
        *("\x1b[48;2;1;2;3m", "\x1b[2K", "38;5;", ";", "m", "<b>", "&amp;", "\n", "9" * 5000),
    ]
)
ANSI_TEXT = st.lists(st.one_of(ANSI_PIECES, st.text(max_size=8))).map("".join)


def row(
    ranks: Iterable[int] = (0,),
    status: Status = Status.READY,
    stage: Stage | None = Stage.VERIFIED,
    entering: Stage | None = None,
    doing: str = "",
    device: str = "cpu",
    host: str = "node-17",
    silent: bool = False,
) -> BoardRow:
    """A row of ranks that are set up and ready, unless said otherwise."""
    return BoardRow(tuple(ranks), status, stage, entering, doing, device, 4711, host, 0.1, silent)


def drawn(*rows: BoardRow, headline: str = "A headline", notes: tuple[str, ...] = ()) -> str:
    return board.html(Board(headline, rows, notes, Snapshot()))


def strip_of(page: str) -> list[str]:
    """The states of a board's stage segments."""
    return re.findall(r'<i class="ddp-([a-z-]+)"', page)


def stream(words: str, what: OutputKind = OutputKind.STDOUT) -> OutputItem:
    return OutputItem(what, words)


def live(*items: OutputItem, tail_lines: int = 60) -> str:
    """The live region of one rank."""
    return output.live([OutputGroup((0,), items)], "", "", tail_lines)


# --------------------------------------------------------------------------- board


@given(headline=st.text(), doing=st.text(), device=st.text(), host=st.text(), note=st.text())
@example(headline=EVIL, doing=EVIL, device=EVIL, host=EVIL, note=EVIL)
def test_no_text_becomes_markup_and_every_text_is_there(
    headline: str, doing: str, device: str, host: str, note: str
) -> None:
    page = Page(drawn(row(doing=doing, device=device, host=host), headline=headline, notes=(note,)))
    assert set(page.tags) <= BOARD_TAGS
    assert {name for name, _ in page.attributes} <= ATTRIBUTES
    assert page.unclosed == []
    for text in (headline, doing.strip(), device, host, note):
        assert strip_ansi(text).strip() in page.text


def test_a_board_says_in_words_what_it_says_in_colour() -> None:
    page = Page(
        drawn(
            row([0, 2, 3], Status.RUNNING, doing="all_reduce (cell 7, line 12)"),
            row([1], Status.SETTING_UP, Stage.STORE, Stage.RENDEZVOUS, silent=True),
            row([4], Status.DEAD, Stage.STORE, Stage.RENDEZVOUS, doing="killed by SIGKILL"),
        )
    )
    assert [text for text in page.texts if text.strip()] == [
        *("A headline", "ranks", "stage", "state", "doing", "device", "pid", "host", "last seen"),
        *("0,", "2-3", "6/6 verified", "running", "all_reduce (cell 7, line 12)"),
        *("cpu", "4711", "node-17", "now"),
        *("1", "4/6 joining rendezvous…", "setting up", "cpu", "4711", "node-17", "silent < 1 s"),
        *("4", "4/6 joining rendezvous", "dead", "killed by SIGKILL"),
        *("cpu", "4711", "node-17", "now"),
    ]


def test_a_board_without_its_style_sheet_is_aligned_and_coloured() -> None:
    page = re.sub(r"<style>.*</style>", "", drawn(row([0]), row([1], Status.DEAD)), flags=re.S)
    styles = [style for name, style in Page(page).attributes if name == "style" and style]
    assert page.count("text-align: left") == page.count("<th ") + page.count("<td ")
    assert page.count("width: 9px") == 2 * len(Stage)
    assert sum("border-radius: 9px" in style for style in styles) == 2
    assert page.count("<tr") == 3
    assert page.count("background: rgba(217, 60, 60, 0.09)") == 1


def test_what_is_on_the_elements_is_no_variable() -> None:
    page = output.live(
        [OutputGroup((0,), (stream("a", OutputKind.STDERR),))], drawn(row([0], silent=True)), "1 s"
    )
    styles = [style for name, style in Page(page).attributes if name == "style" and style]
    assert styles
    assert not any("var(" in style or "color-mix(" in style for style in styles)


@pytest.mark.parametrize(
    ("status", "stage", "entering", "states"),
    [
        (Status.STARTING, None, None, ["to-come"] * 6),
        (Status.READY, Stage.VERIFIED, None, ["passed"] * 6),
        (
            Status.SETTING_UP,
            Stage.STORE,
            Stage.RENDEZVOUS,
            ["passed"] * 3 + ["entering"] + ["to-come"] * 2,
        ),
        (
            Status.FAILED,
            Stage.ENVIRONMENT,
            Stage.STORE,
            ["passed"] * 2 + ["failed"] + ["to-come"] * 3,
        ),
        (Status.DEAD, Stage.LAUNCHED, Stage.ENVIRONMENT, ["passed", "failed"] + ["to-come"] * 4),
        (Status.DEAD, Stage.VERIFIED, None, ["passed"] * 6),
    ],
)
def test_the_strip_shows_each_stage(
    status: Status, stage: Stage | None, entering: Stage | None, states: list[str]
) -> None:
    assert strip_of(drawn(row([0], status, stage, entering))) == states


def test_a_column_in_which_no_rank_has_anything_is_left_out() -> None:
    assert "doing" not in Page(drawn(row([0]), row([1]))).texts
    assert "doing" in Page(drawn(row([0]), row([1], doing="cell 3"))).texts


def test_no_ranks_are_a_headline_without_a_table() -> None:
    page = Page(drawn(headline="No ranks."))
    assert page.text == "No ranks."
    assert "table" not in page.tags


def test_nothing_is_loaded_and_nothing_runs() -> None:
    page = drawn(row([0], Status.DEAD, doing=EVIL))
    assert "<script" not in page
    assert not re.search(r"url\(|@import|https?://", page)


# --------------------------------------------------------------------------- colours


@given(ANSI_TEXT)
@example("\x1b[" + "9" * 5000 + "m")
@example("a\x1b")
def test_the_text_between_the_tags_is_the_text_without_escape_codes(text: str) -> None:
    page = Page(ansi_to_html(text))
    assert page.text == strip_ansi(text)
    assert set(page.tags) <= {"span"}
    assert page.unclosed == []


@given(st.text(st.characters(exclude_characters="\x1b")))
def test_text_without_escape_codes_is_left_alone(text: str) -> None:
    assert strip_ansi(text) == text
    assert Page(ansi_to_html(text)).text == text


def span(text: str, classes: str, style: str = "") -> str:
    inline = f' style="{style}"' if style else ""
    return f'<span class="{classes}"{inline}>{text}</span>'


@pytest.mark.parametrize(
    ("codes", "drawn_x"),
    [
        ("1", span("x", "ddp-bold")),
        ("3", span("x", "ddp-italic")),
        ("4", span("x", "ddp-underline")),
        ("31", span("x", "ddp-fg", "--ddp-fg:#e75c58")),
        ("91", span("x", "ddp-fg", "--ddp-fg:#b22b31")),
        ("43", span("x", "ddp-bg", "--ddp-bg:#ddb62b")),
        ("38;5;9", span("x", "ddp-fg", "--ddp-fg:#b22b31")),
        ("38;5;196", span("x", "ddp-fg", "--ddp-fg:#ff0000")),
        ("38;5;28", span("x", "ddp-fg", "--ddp-fg:#008700")),
        ("38;5;232", span("x", "ddp-fg", "--ddp-fg:#080808")),
        ("38;5;255", span("x", "ddp-fg", "--ddp-fg:#eeeeee")),
        ("38;2;1;20;255", span("x", "ddp-fg", "--ddp-fg:#0114ff")),
        ("01;32;48;5;21", span("x", "ddp-fg ddp-bg ddp-bold", "--ddp-fg:#00a250;--ddp-bg:#0000ff")),
        ("31;39", "x"),
        ("43;49", "x"),
        ("1;3;4;22;23;24", "x"),
        ("1;31;0", "x"),
        ("1;31;", "x"),
        ("38;5;256", "x"),
        ("38;5", "x"),
        ("38;2;1;2", "x"),
        ("38", "x"),
        ("38;9;31", span("x", "ddp-fg", "--ddp-fg:#e75c58")),
        ("7;53;999;12345;4:3", "x"),
        ("?25", "x"),
    ],
)
def test_colour_codes_become_spans_and_unknown_ones_are_dropped(codes: str, drawn_x: str) -> None:
    assert ansi_to_html(f"\x1b[{codes}mx") == drawn_x


def test_a_reset_ends_a_colour() -> None:
    red = span("a&lt;", "ddp-fg", "--ddp-fg:#e75c58")
    assert ansi_to_html("\x1b[31ma<\x1b[0mb\x1b[1m\x1b[mc") == f"{red}bc"


@pytest.mark.parametrize(
    "code", ["\x1b[2J", "\x1b[1;5H", "\x1b[?25l", "\x1b]0;title\x07", "\x1b]8;;u\x1b\\", "\x1b(B"]
)
def test_codes_that_are_not_colours_are_dropped(code: str) -> None:
    assert ansi_to_html(f"a{code}b") == strip_ansi(f"a{code}b") == "ab"


def test_a_code_that_never_ends_takes_no_more_than_its_line() -> None:
    assert strip_ansi("a\x1b]0;title\nb\x1b[31") == "a0;title\nb"


def test_a_cut_within_an_escape_code_moves_behind_it() -> None:
    text = "ab\x1b[31mcd"
    assert [text[after_escape(text, cut) :] for cut in (1, 2, 3, 5, 7, 8)] == [
        *("b\x1b[31mcd", "\x1b[31mcd", "cd", "cd", "cd", "d")
    ]


# --------------------------------------------------------------------------- live region


@given(st.lists(ANSI_TEXT, max_size=4), st.sampled_from(OutputKind), st.text())
def test_what_ranks_write_and_display_never_becomes_markup(
    texts: list[str], what: OutputKind, elapsed: str
) -> None:
    items = [stream(text, what) for text in texts]
    items += [OutputItem(OutputKind.DISPLAY, data={"text/plain": text}) for text in texts]
    items += [
        OutputItem(OutputKind.DISPLAY, data={"image/png": text, "text/plain": text})
        for text in texts
    ]
    page = Page(output.live([OutputGroup((0, 1), tuple(items))], "", elapsed, 10_000))
    assert set(page.tags) <= LIVE_TAGS
    assert {name for name, _ in page.attributes} <= ATTRIBUTES
    assert page.unclosed == []
    assert all(strip_ansi(text).removesuffix("\r") in page.text for text in (*texts, elapsed))


def test_each_group_is_named_by_its_ranks_and_the_board_comes_last() -> None:
    groups = [
        OutputGroup((0, 1, 3), (stream("epoch 1\n"),)),
        OutputGroup((2,), (stream("no", OutputKind.STDERR),)),
        OutputGroup((4,), ()),
    ]
    page = output.live(groups, drawn(row([0])), "12.4 s")
    texts = Page(page).texts
    assert texts[: texts.index("A headline")] == [
        *("ranks 0, 1 and 3", "epoch 1\n", "rank 2", "no", "rank 4", "no output yet", "12.4 s")
    ]
    assert page.count("<style>") == 1
    assert re.search(r'<span class="ddp-stderr" style="background: rgba\([^"]*">no</span>', page)


def test_only_the_last_lines_are_shown_and_the_others_are_counted() -> None:
    words = "".join(f"line {n}\n" for n in range(2000))
    texts = Page(live(stream(words), tail_lines=2)).texts
    assert texts == ["rank 0", " · 1,998 lines above", "line 1998\nline 1999\n"]


@given(st.lists(st.sampled_from(["a", "bc\n", "\n", "d\ne"])), st.integers(1, 6))
def test_what_is_shown_and_what_is_left_out_are_all_there_is(
    pieces: list[str], tail_lines: int
) -> None:
    whole = "".join(pieces)
    texts = Page(live(stream(whole), tail_lines=tail_lines)).texts
    shown = texts[-1] if whole else ""
    assert whole.endswith(shown)
    assert len(shown.splitlines()) == min(tail_lines, len(whole.splitlines()))
    left = len(whole.splitlines()) - len(shown.splitlines())
    assert (f" · {left} line{'s' * (left != 1)} above" in texts) == (left > 0)


def test_lines_are_taken_from_the_end_over_all_pieces() -> None:
    items = (stream("a\nb\n"), stream("c\nd\n", OutputKind.STDERR), stream("e\n"))
    assert Page(live(*items, tail_lines=2)).texts == ["rank 0", " · 3 lines above", "d\n", "e\n"]


def test_of_a_line_that_never_ends_the_end_is_shown() -> None:
    texts = Page(live(stream("first\n" + "x" * 10**6 + "END"), tail_lines=2)).texts
    assert texts[1] == " · 1 line, the beginning of a line above"
    assert texts[2] == "x" * 397 + "END"


def test_an_image_is_shown_and_counts_as_lines() -> None:
    image = OutputItem(
        OutputKind.DISPLAY, data={"image/png": "iVBORw0=\n", "text/plain": "<Figure>"}
    )
    page = live(stream("a\n"), image, image, stream("b\n"), tail_lines=15)
    assert page.count('<img src="data:image/png;base64,iVBORw0=\n" alt="&lt;Figure&gt;">') == 1
    assert Page(page).texts == ["rank 0", " · 1 line, 1 image above", "b\n"]


def test_html_from_a_rank_is_not_put_into_the_page() -> None:
    frame = OutputItem(
        OutputKind.RESULT, data={"text/html": "<script>x()</script>", "text/plain": "   a\n0  1"}
    )
    bare = OutputItem(OutputKind.DISPLAY, data={"text/html": "<script>x()</script>"})
    texts = Page(live(stream("open"), frame, bare)).texts
    assert "".join(texts[1:]) == "open\n   a\n0  1\n(display: text/html)\n"


def test_the_same_input_gives_the_same_page() -> None:
    item = stream("\x1b[31mred\x1b[0m " * 50)
    assert live(item) == live(item)


@pytest.mark.alone
def test_what_drawing_the_output_of_64_ranks_costs_does_not_grow_with_the_output() -> None:
    line = "\x1b[32mepoch\x1b[0m 12 step 345 loss 0.4415 <tag> & more of the same words\n"

    def drawn_in_s(size_bytes: int) -> float:
        text = line * (size_bytes // len(line))
        groups = [OutputGroup((rank,), (stream(text + str(rank)),)) for rank in range(64)]
        took = []
        for _ in range(5):
            began = time.perf_counter()
            output.live(groups, "", "")
            took.append(time.perf_counter() - began)
        return min(took)

    assert drawn_in_s(2**20) < 8 * drawn_in_s(2**16), "16 times the output"
