"""notebooks/REFERENCE.md, IPython's magics and the board's buttons are those of `VERBS`."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddp_notebook.board import model
from ddp_notebook.board.buttons import Button, Buttons
from ddp_notebook.board.model import Action
from ddp_notebook.errors import NoSession, UsageMistake
from ddp_notebook.magics.reference import reference
from ddp_notebook.magics.register import board_buttons
from ddp_notebook.magics.verb import Verb
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.magics.verbs.lab import TOUR_TEXT
from ddp_notebook.model import Board, Diagnosis, Snapshot, StepTable
from ddp_notebook.session import Session
from ddp_notebook.views.board_rows import board

PAGE = Path(__file__).parents[2] / "notebooks" / "REFERENCE.md"
BY_NAME = {verb.name: verb for verb in VERBS}
each_verb = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)


def test_the_page_is_the_one_that_the_verbs_make() -> None:
    made = "python -m ddp_notebook.magics.reference > notebooks/REFERENCE.md"
    assert PAGE.read_text("utf-8") == reference(), f"the verbs have changed; type: {made}"


@each_verb
def test_the_page_has_every_option_its_default_and_every_example(verb: Verb) -> None:
    section = reference().partition(f"\n## {verb.magic}")[2].partition("\n## ")[0]
    options = {name for action in verb.parser._actions for name in action.option_strings}
    typed = {
        name for cell in re.findall(r"^\| (.*?) \|", section, re.M) for name in cell.split("`")
    }
    assert options - {"-h", "--help"} == {n.split()[0] for n in typed if n.startswith("-")} - {
        "---"
    }
    defaults = {action.dest: action.default for action in verb.parser._actions}
    for option in verb.options:
        default = defaults[option.attribute]
        if default not in (None, False, "", []) and "default:" not in option.help:
            assert f"(default {str(default).removesuffix('.0')})" in section
    for call, purpose in verb.examples:
        assert call in section and purpose in section


@each_verb
def test_every_verb_is_a_magic_and_its_docstring_says_what_it_does(verb: Verb, shell: Any) -> None:
    magic = shell.find_line_magic(verb.name)
    assert verb.summary in magic.__doc__
    assert (shell.find_cell_magic(verb.name) is not None) == (verb.kind == "line_cell")


def test_no_magic_of_ours_is_left_when_the_extension_is_unloaded(shell: Any) -> None:
    shell.run_line_magic("unload_ext", "ddp_notebook")
    assert not [name for name in shell.magics_manager.magics["line"] if name.startswith("ddp")]
    assert not [name for name in shell.magics_manager.magics["cell"] if name.startswith("ddp")]
    shell.run_line_magic("load_ext", "ddp_notebook")
    assert shell.find_line_magic("ddp_init") is not None


def test_every_call_of_the_tour_can_be_typed() -> None:
    for magic, line in re.findall(r"(%%?ddp\w*)((?: --?[\w-]+(?: \w+)?| \w+-\w+)*)", TOUR_TEXT):
        BY_NAME[magic.lstrip("%")].parser.read(line)


# -- the buttons of the board --------------------------------------------------------------------


def actions() -> list[Action]:
    """Every button that a board may show but the one that cancels a benchmark."""
    shown = [*model.actions((), True, True), *model.actions((), True, False, True)]
    return [action for action in shown if action.magic != model.INTERRUPT]


def test_every_button_of_the_board_is_a_verb_with_a_button_and_the_other_way_round() -> None:
    shown = {action.magic.partition(" ")[0].lstrip("%") for action in actions()}
    shown.add("ddp_break")  # a click beside a line
    assert shown == set(board_buttons(Session(), VERBS))
    for action in actions():
        name, _, line = action.magic.removeprefix("%").partition(" ")
        BY_NAME[name].parser.read(line)


@each_verb
def test_a_button_runs_the_verbs_own_code(verb: Verb) -> None:
    if verb.name == "ddp_break":
        return  # a page may set plain breakpoints only: the next test
    assert verb.button is None or verb.button.run is verb.run


@pytest.mark.parametrize("line", ["7 --if True", "7 --log {x}"])
def test_a_page_that_asks_for_code_of_its_own_at_a_breakpoint_is_refused(line: str) -> None:
    verb = BY_NAME["ddp_break"]
    assert verb.button is not None
    with pytest.raises(UsageMistake, match="plain breakpoints"):
        verb.button.run(cast("Any", None), verb.parser.read(line))


class Answers:
    """A session that answers every question of a button."""

    running = True
    findings = SimpleNamespace(begun=0)
    record = Session().record

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.runs = SimpleNamespace(current=None, stops={})
        self.pool = SimpleNamespace(need=self.need)

    def need(self, verb: str) -> None:
        self.asked.append(("require", verb))

    def why(self) -> Diagnosis:
        return Diagnosis(())

    def step(self, ranks: Any, to: str | None, how: str) -> StepTable:
        self.asked.append(("step", ranks, to))
        return StepTable("paused", ())

    def restart(self, ranks: Any) -> Board:
        self.asked.append(("restart", ranks))
        return board(Snapshot())


def pressed(session: Any, magic: str, buttons: dict[str, Button] | None = None) -> dict[str, Any]:
    """The answer of a button, and the diagnoses that the board was told of."""
    told: list[Diagnosis] = []
    pressing = Buttons(session, buttons or board_buttons(session, VERBS), lambda: None, told.append)
    pressing._do(magic)
    return {**pressing.answers[0], "diagnoses": told}


def test_a_button_gives_the_verbs_value_as_text() -> None:
    session = Answers()
    session.record.begin(3)
    assert pressed(session, "%ddp_step --ranks 0,2 --to end")["ok"]
    assert pressed(session, "%ddp_restart --ranks 1")["ok"]
    assert session.asked == [
        ("step", (0, 2), "end"),
        ("require", "%ddp_restart"),
        ("restart", (1,)),
    ]
    why = pressed(session, "%ddp_why")
    assert why["ok"] and why["text"] and why["diagnoses"] == [Diagnosis(())]
    assert pressed(session, "%ddp_why --json")["text"].startswith("{")


def test_a_button_has_one_answer_for_whichever_ranks_it_was_pressed() -> None:
    """Three tabs were called Step."""
    session = Answers()
    session.record.begin(2)
    pressing = Buttons(session, board_buttons(session, VERBS), lambda: None, lambda _: None)  # type: ignore[arg-type]
    for magic in ("%ddp_step", "%ddp_why", "%ddp_step --ranks 0", "%ddp_step --to end"):
        pressing._do(magic)
    assert [answer["magic"] for answer in pressing.answers] == ["%ddp_step --to end", "%ddp_why"]


def test_what_is_seen_in_the_code_at_which_ranks_are_paused_needs_no_answer() -> None:
    session = Answers()
    session.record.begin(2)
    pressing = Buttons(session, board_buttons(session, VERBS), lambda: None, lambda _: None)  # type: ignore[arg-type]
    pressing._do("%ddp_step --into")
    session.runs.stops = {0: object()}
    for _ in range(2):
        pressing._do("%ddp_step --into")
    assert not pressing.answers
    pressing._do("%ddp_step --nope")
    assert not pressing.answers[0]["ok"], "what went wrong is said"


@pytest.mark.parametrize(
    ("magic", "text"),
    [
        ("%ddp_step --ranks 9", "Rank 9 does not exist"),
        ("%ddp_step --nope", "%ddp_step has no option --nope. For example: %ddp_step"),
        ("%ddp_shutdown", "The board has no button for %ddp_shutdown."),
        ("ddp_why", "The board has no button for ddp_why."),
        ("%ddp_init --world-size 4", "The board has no button for %ddp_init --world-size 4."),
    ],
)
def test_what_a_button_cannot_do_is_its_answer(magic: str, text: str) -> None:
    session = Answers()
    session.record.begin(3)
    answer = pressed(session, magic)
    assert not answer["ok"] and text in answer["text"]


def test_an_error_of_the_session_is_the_answer() -> None:
    def lost(_: str) -> tuple[Any, str]:
        raise NoSession("%ddp_why")

    answer = pressed(Answers(), "%ddp_why", {"ddp_why": Button(lost)})
    assert not answer["ok"] and "%ddp_why needs ranks" in answer["text"]


def test_one_button_at_a_time_moves_ranks() -> None:
    session = Answers()
    pressing = Buttons(
        session,  # type: ignore[arg-type]
        board_buttons(session, VERBS),  # type: ignore[arg-type]
        lambda: None,
        lambda _: None,
    )
    pressing.busy = ("%ddp_restart", "%ddp_step")
    pressing._do("%ddp_step")
    assert pressing.answers[0]["text"] == "%ddp_restart is still running. To stop it: %ddp_abort"
    pressing.busy = ("%ddp_restart", "%ddp_why")
    pressing._do("%ddp_why")
    assert pressing.answers[0]["ok"]
