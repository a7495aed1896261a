"""Diagnoses and step tables as text, line by line, and as HTML: nothing said becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import Page, whole_page

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import (
    Category,
    Decision,
    Diagnosis,
    Finding,
    JudgedRun,
    Place,
    Side,
    StepRow,
    StepTable,
    Traceback,
)
from ddp_notebook.views import findings, step_table
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.notebook import mime_bundle
from ddp_notebook.views.table import WIDTH

EVIL = "</td></code></details><script>alert('1')</script>\"><img src=x onerror=a()>&lt;&amp;"
TAGS = {
    *("table", "thead", "tbody", "tr", "th", "td", "div", "span", "code", "pre", "a", "b", "br"),
    "wbr",
    *("details", "summary", "ul", "li"),
}
ATTRIBUTES = {"class", "style", "scope", "open", "href", "target", "rel"}

DUPLICATE = Finding(
    Category.DUPLICATE_RANK,
    ranks=(3,),
    cause="its environment says RANK=1, which another process is already, so nobody is rank 3",
    remedy="%ddp_restart --ranks 3",
    waiting=(0, 1, 2),
    evidence=(
        "the join key of rank 1 was written twice: by pid 4712 and by pid 4714",
        "no process wrote the join key of rank 3",
    ),
)
STRAGGLER = Finding(
    Category.STRAGGLER,
    ranks=(2,),
    cause="it still reads its data set (data.py, line 48)",
    remedy="wait, or load the data after init_process_group",
    waiting=(0,),
    passing=True,
)
UNDECIDED = Finding(
    Category.UNDECIDED, (), "the ranks contradict each other", "%ddp_why, once more", (), ("a",)
)
HELD_BACK = StepTable(
    title="store: ranks 0, 1 and 3 are there, rank 2 is held back",
    rows=(
        StepRow((0,), "environment", "waiting", "listens on port 41234", (2,), 12.3),
        StepRow((1, 3), "environment", "waiting", "the store's key init/rank_2", (2,), 11.8),
        StepRow((2,), "", "paused", "held back before store", (), 203.0),
    ),
    about="The store is a small key-value server on rank 0.",
    link="https://docs.pytorch.org/docs/stable/distributed.html",
    next_call="%ddp_step store --ranks 2",
    details=("init/worker_count   3", "init/rank_2         (nobody wrote it)"),
)

ranks = st.lists(st.integers(0, 127), unique=True).map(lambda members: tuple(sorted(members)))
pieces = ["\x1b[31m", "\x1b", "\n", "\t", "\r\x1a", " ", "<b>", "&", "x" * 120, "a"]
said = st.text() | st.lists(st.sampled_from(pieces)).map("".join)
some = st.lists(said, max_size=3).map(tuple)
some_places = st.builds(Place, said, st.integers(1, 120), said, said)
some_sides = st.builds(
    Side, ranks, said, said, st.none() | some_places, st.lists(some_places, max_size=3).map(tuple),
    said, said,
)  # fmt: skip
decisions = st.none() | st.builds(Decision, some_places, said)
any_finding = st.builds(
    lambda sides, decides, code, *of: Finding(*of, sides=sides, decides=decides).with_code(code),
    st.lists(some_sides, max_size=3).map(tuple),
    decisions,
    st.dictionaries(said, said.map(lambda text: f"{text}\n" * 3), max_size=2),
    *(st.sampled_from(Category), ranks, said, said, ranks, some, st.booleans()),
)
diagnoses = st.builds(
    Diagnosis,
    st.lists(any_finding, max_size=3).map(tuple),
    st.none() | st.dictionaries(st.integers(0, 127), said, max_size=12),
    st.integers(0, 128),
)
states = st.sampled_from(["paused", "waiting", "failed", "dead", "done"]) | said
step_rows = st.builds(StepRow, ranks, said, states, said, ranks, st.floats())
links = said | st.sampled_from(["https://x.org/\"'<b>", "javascript:alert(1)"])
step_tables = st.builds(
    StepTable, said, st.lists(step_rows, max_size=4).map(tuple), said, links, said, some
)


def html_of(*found: Finding, doing: dict[int, str] | None = None) -> Page:
    return whole_page(findings.html(Diagnosis(found, doing)))


def text_of(*found: Finding, doing: dict[int, str] | None = None) -> str:
    """The diagnosis as text, with a newline at its end."""
    return findings.text(Diagnosis(found, doing)) + "\n"


# --------------------------------------------------------------------------- diagnosis, text


def test_a_finding_is_a_sentence_then_what_to_do_who_waits_and_what_proves_it() -> None:
    waits = "waits in init_process_group for rank 3"
    doing = {0: waits, 1: waits, 2: waits, 3: "waits in init_process_group, as rank 1"}
    assert text_of(DUPLICATE, doing=doing) == dedent("""\
        ✗ Rank 3: its environment says RANK=1, which another process is already, so nobody is rank 3
          [duplicate-rank]
        fix: %ddp_restart --ranks 3
        next: Ranks 0-2 are waiting. · more: %ddp_why --explain
        evidence:
          • the join key of rank 1 was written twice: by pid 4712 and by pid 4714
          • no process wrote the join key of rank 3

        rank activity:
          ranks 0-2: waits in init_process_group for rank 3
          rank 3:    waits in init_process_group, as rank 1
        """)


def test_what_may_mend_itself_is_busy_and_not_stuck() -> None:
    doing = {0: "waits for rank 2", 2: "load_shard (data.py, line 48)", 1: "waits for rank 2"}
    assert text_of(STRAGGLER, doing=doing) == dedent("""\
        ► busy, not stuck · Rank 2: it still reads its data set (data.py, line 48) [straggler]
        fix: wait, or load the data after init_process_group
        next: Rank 0 is waiting. · more: %ddp_why --explain

        rank activity:
          ranks 0 and 1: waits for rank 2
          rank 2:        load_shard (data.py, line 48)
        """)


def test_nothing_wrong_is_one_calm_line_and_what_the_ranks_do() -> None:
    assert text_of() == "✓ No problem found.\n"
    assert text_of(doing=dict.fromkeys(range(64), "ready")) == dedent("""\
        ✓ No problem found.

        rank activity:
          ranks 0-63: ready
        """)


def test_further_findings_come_after_the_first() -> None:
    first, further = text_of(STRAGGLER).rstrip(), text_of(UNDECIDED)
    more = "more: %ddp_why --explain\n"
    assert text_of(STRAGGLER, UNDECIDED) == (
        f"{first}\n\nalso found:\n\n{further.replace(more, '')}"
    ), "where more is said stands once"
    assert further == dedent("""\
        ? No rank in particular: the ranks contradict each other [undecided]
        fix: %ddp_why, once more
        more: %ddp_why --explain
        evidence:
          • a
        """)


def test_many_ranks_that_do_not_follow_each_other_are_broken_at_a_comma() -> None:
    even = tuple(range(0, 64, 2))
    found = Finding(Category.ENV_MISMATCH, even, "MASTER_PORT is 29501 there", "")
    assert text_of(found, doing=dict.fromkeys(even, "connects") | {1: "waits"}) == dedent("""\
        ✗ Ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46,
          48, 50, 52, 54, 56, 58, 60 and 62: MASTER_PORT is 29501 there [env-mismatch]
        more: %ddp_why --explain

        rank activity:
          ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46,
          48, 50, 52, 54, 56, 58, 60 and 62:
              connects
          rank 1: waits
        """)  # noqa: E501


def test_escape_codes_and_line_ends_are_taken_out() -> None:
    found = Finding(Category.RANK_DIED, (1,), "\x1b[31mno\x1b[0m\r\n\tgood\x07", "%ddp\n_restart")
    assert "Rank 1: no good [rank-died]" in text_of(found)
    assert "fix: %ddp _restart\n" in text_of(found)


# --------------------------------------------------------------------------- steps, text


def test_a_step_with_one_rank_held_back() -> None:
    assert step_table.text(HELD_BACK) + "\n" == dedent("""\
        store: ranks 0, 1 and 3 are there, rank 2 is held back

        ranks  passed       state      where, or why                waits for  since
        ─────  ───────────  ─────────  ───────────────────────────  ─────────  ──────────
        0      environment  … waiting  listens on port 41234        rank 2     12 s
        1,3    environment  … waiting  the store's key init/rank_2  rank 2     11 s
        2      none         ‖ paused   held back before store                  3 min 23 s

        The store is a small key-value server on rank 0.
        https://docs.pytorch.org/docs/stable/distributed.html

        init/worker_count   3
        init/rank_2         (nobody wrote it)

        next: %ddp_step store --ranks 2
        """)


def test_sixty_four_ranks_of_which_some_failed_and_a_column_nobody_needs() -> None:
    refused = "DistNetworkError: the client socket has timed out after 60000 ms while connecting"
    table = StepTable(
        "rendezvous: 62 of 64 ranks joined",
        (
            StepRow(tuple(range(62)), "rendezvous", "done", "", (), 0.4),
            StepRow((62,), "store", "failed", refused, (), 61),
            StepRow((63,), "store", "dead", "killed by SIGKILL", (), 7500),
        ),
    )
    assert step_table.text(table) + "\n" == dedent("""\
        rendezvous: 62 of 64 ranks joined

        ranks  passed      state     where, or why                                            since
        ─────  ──────────  ────────  ───────────────────────────────────────────────────────  ─────────
        0-61   rendezvous  ✓ done                                                             < 1 s
        62     store       ✗ failed  DistNetworkError: the client socket has timed out after  1 min 1 s
                                     60000 ms while connecting
        63     store       † dead    killed by SIGKILL                                        2 h 5 min
        """)  # noqa: E501


def test_a_step_without_anything_is_its_title() -> None:
    assert step_table.text(StepTable("store: nobody yet", ())) == "store: nobody yet"
    assert whole_page(step_table.html(StepTable("none", ()))).tags == ["div", "div"]


@pytest.mark.parametrize(
    ("since_s", "words"),
    [
        *((0, "< 1 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min 59 s"), (3600, "1 h")),
        *((-1, "< 1 s"), (float("inf"), ""), (float("nan"), "")),
    ],
)
def test_how_long_is_said_to_the_second_for_an_hour(since_s: float, words: str) -> None:
    assert step_table.since_words(since_s) == words


# --------------------------------------------------------------------------- HTML


def test_a_rank_that_lost_its_connection_is_not_said_to_be_waiting() -> None:
    died = Finding(Category.RANK_DIED, (3,), "killed", "%ddp_abort", waiting=(0, 1, 2))
    doing = {0: "failed: RuntimeError: Connection reset", 1: "waits in all_reduce", 2: "waits"}
    assert findings.waiting_words(died, Diagnosis((died,), doing)) == "Ranks 1 and 2 are waiting."
    assert findings.waiting_words(died, Diagnosis((died,), dict.fromkeys(range(3), doing[0]))) == ""


def test_the_page_says_what_the_text_says_and_folds_the_evidence() -> None:
    page = html_of(DUPLICATE, doing={0: "waits for rank 3", 1: "waits for rank 3", 3: "is rank 1"})
    assert [text.strip() for text in page.texts if text.strip()] == [
        *("✗", f"Rank 3: {DUPLICATE.cause}", "[duplicate-rank]"),
        *_page_texts(),
        *("fix", "%ddp_restart --ranks 3"),
        "next: Ranks 0-2 are waiting. · more: %ddp_why --explain",
        *("evidence", "(2 facts)", *DUPLICATE.evidence),
        *("rank activity", "rank", "activity"),
        *("ranks 0 and 1", "waits for rank 3", "rank 3", "is rank 1"),
    ]
    assert page.tags.count("details") == 3
    assert page.values("open") == [], "below a finding all else is folded"


def _page_texts() -> list[str]:
    """What the category unfolds; neither its program nor what code its words have is compared."""
    shown = html_of(DUPLICATE).texts
    begin, end = shown.index("[duplicate-rank]") + 1, shown.index("fix")
    texts = [text.strip() for text in shown[begin:end] if text.strip()]
    told = catalogue.entry("duplicate-rank")["page"]
    written = " ".join(texts)
    for key in ("means", "found", "fix", "broken"):
        for word in told[key].replace("`", " ").split():
            assert word in written, key
    for line in told["fixed"].strip("\n").splitlines():
        assert line.strip() in texts
    return texts


@pytest.mark.parametrize("category", Category)
def test_each_category_unfolds_its_page_small_and_as_text(category: Category) -> None:
    shown = findings.html(Diagnosis((Finding(category, (0,), "is wrong", "Change it."),)))
    page = whole_page(shown)
    assert set(page.tags) <= TAGS
    assert f"[{category.value}]" in page.texts
    assert len(shown) < 6_000


def test_a_cause_with_a_script_in_it_is_text() -> None:
    found = Finding(Category.UNDECIDED, (1,), EVIL, EVIL, (), (EVIL,))
    page = html_of(found, doing={0: EVIL})
    assert set(page.tags) <= TAGS
    assert page.text.count("<script>alert('1')</script>") == 4
    assert "<script" not in findings.html(Diagnosis((found,), {0: EVIL}))


def test_each_tone_has_a_symbol_beside_its_colour() -> None:
    assert html_of().texts[0] == "✓"
    assert html_of(DUPLICATE).texts[0] == "✗"
    assert html_of(UNDECIDED).texts[0] == "?"
    assert html_of(STRAGGLER).texts[:2] == ["►", "busy, not stuck"]
    assert "600" not in findings.html(Diagnosis((STRAGGLER,)))


def test_what_many_ranks_do_differently_is_folded() -> None:
    assert html_of(doing={r: f"step {r}" for r in range(8)}).values("open") == [None]
    assert html_of(doing={r: f"step {r}" for r in range(9)}).values("open") == []


def test_tables_have_headers_for_columns_and_rows() -> None:
    page = whole_page(step_table.html(HELD_BACK))
    assert page.values("scope") == ["col"] * 6 + ["row"] * 3
    begin = page.texts.index("ranks")
    headers = ["ranks", "passed", "state", "where, or why", "waits for", "since"]
    assert page.texts[begin : begin + 6] == headers
    assert html_of(doing={0: "a", 1: "b"}).values("scope") == ["col", "col", "row", "row"]


def test_only_a_web_address_becomes_a_link() -> None:
    assert whole_page(step_table.html(HELD_BACK)).values("href") == [HELD_BACK.link]
    script = whole_page(step_table.html(StepTable("", (), link="javascript:alert(1)")))
    assert script.tags == ["div", "div"]
    quoting = whole_page(step_table.html(StepTable("", (), link='https://x.org/"><b>')))
    assert quoting.values("href") == ['https://x.org/"><b>']


def test_what_is_on_the_elements_survives_an_untrusted_notebook() -> None:
    for page in (html_of(DUPLICATE, STRAGGLER), whole_page(step_table.html(HELD_BACK))):
        assert "style" not in page.tags
        assert not any("var(" in (style or "") for style in page.values("style"))


def test_a_bundle_has_both_forms() -> None:
    wrong = Diagnosis((DUPLICATE,))
    assert mime_bundle(wrong) == {
        "text/plain": findings.text(wrong),
        "text/html": findings.html(wrong),
    }
    assert mime_bundle(HELD_BACK) == {
        "text/plain": step_table.text(HELD_BACK),
        "text/html": step_table.html(HELD_BACK),
    }


# --------------------------------------------------------------------------- whatever is said


def check(bundle: dict[str, str]) -> Page:
    """Text within its width that moves no cursor; markup of our own tags only. The page."""
    lines = bundle["text/plain"].split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    bundle["text/html"].encode()
    page = whole_page(bundle["text/html"])
    assert set(page.tags) <= TAGS
    assert {name for name, _ in page.attributes} <= ATTRIBUTES
    assert all(re.match(r"https?://", href or "") for href in page.values("href"))
    return page


@given(diagnoses)
@example(Diagnosis((Finding(Category.UNDECIDED, (), EVIL, EVIL, (0,), (EVIL,)),), {0: EVIL}))
def test_whatever_a_diagnosis_says_it_is_shown_within_100_columns(d: Diagnosis) -> None:
    page = check(mime_bundle(d))
    shown = [words for f in d.findings for words in (f.cause, f.remedy, *f.evidence)]
    text = page.text.replace("`", "")
    assert all(plain(words).replace("`", "") in text for words in shown)


@given(step_tables)
@example(StepTable(EVIL, (StepRow((0,), EVIL, EVIL, EVIL),), EVIL, EVIL, EVIL, (EVIL,)))
def test_whatever_a_step_says_it_is_shown_within_100_columns(t: StepTable) -> None:
    page = check(mime_bundle(t))
    shown = (t.title, t.about, t.link, t.next_call, *(row.text for row in t.rows))
    assert all(plain(words) in page.text for words in shown)


@given(st.dictionaries(st.integers(0, 127), st.sampled_from(["a", "b", " a\n", "c"])))
def test_ranks_that_did_the_same_are_named_once(doing: dict[int, str]) -> None:
    folded = findings.folded_doing(doing)
    assert len({text for _, text in folded}) == len(folded)
    assert {text for _, text in folded} == {text.strip() for text in doing.values()}


def test_what_was_found_earlier_says_when_and_a_traceback_is_escaped_and_comes_below() -> None:
    finding = Finding(
        Category.EXCEPTION_ON_ONE_RANK, (1,), "raised ValueError", "Correct it.", (0,)
    )
    traceback = Traceback((1,), "\x1b[31mValueError\x1b[0m: <i>no</i>\n" + "deep\n" * 1000)
    run = JudgedRun("cell 3", 3, True, "2026-01-01T00:00:00", 130.0)
    d = Diagnosis((finding,), tracebacks=(traceback,), run=run)
    text, page = findings.text(d), findings.html(d)
    assert text.startswith("From cell 3 (2 min ago).\n\n✗ Rank 1")
    assert text.index("✗ Rank 1") < text.index("ValueError: <i>") < text.index("lines not shown")
    assert "Rank 0 was waiting." in text and "Rank 0 was waiting." in page
    assert "&lt;i&gt;no&lt;/i&gt;" in page and "<i>no" not in page and "\x1b" not in text + page
    assert d.to_json()["tracebacks"][0]["text"].startswith("ValueError: <i>no</i>")


def test_nothing_found_is_green_only_where_it_is_proved() -> None:
    unsure = Diagnosis(unsure="No problem found so far: rank 0 waits.")
    assert findings.text(unsure) == "► No problem found so far: rank 0 waits."
    assert findings.CALM not in findings.html(unsure)


def test_what_ranks_raised_stands_below_the_finding_that_of_the_culprit_first() -> None:
    finding = Finding(Category.EXCEPTION_ON_ONE_RANK, (1,), "raised ValueError", "Correct it.")
    victim, culprit = Traceback((0,), "Connection closed by peer"), Traceback((1,), "ValueError: 7")
    for show in (findings.text, findings.html):
        shown = show(Diagnosis((finding,), None, 2, tracebacks=(victim, culprit)))
        order = [shown.index(each) for each in ("Correct it", "ValueError: 7", "Connection closed")]
        assert order == sorted(order)
    # Where the cause is not known, nobody is a victim, and what was raised is not folded.
    open_question = Diagnosis(
        (replace(finding, category=Category.UNDECIDED),), None, 2, tracebacks=(victim, culprit)
    )
    assert findings.RAISED_TOO not in findings.text(open_question)
    assert "<details open" in findings.html(open_question)
    assert "<details open" not in findings.html(replace(open_question, findings=(finding,)))
