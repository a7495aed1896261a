"""What Tab offers on the line of a magic, and what `-h` shows."""

from __future__ import annotations

import pytest

from ddp_notebook.magics.completion import complete
from ddp_notebook.magics.parser import Surroundings
from ddp_notebook.magics.verb import Verb
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.model import RankState, Status

STATES = (Status.READY, Status.DEAD, Status.READY, Status.READY)
AROUND = Surroundings(
    variables=("batch", "bias", "lr"),
    ranks=tuple(RankState(rank, status=status) for rank, status in enumerate(STATES)),
)
each_verb = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%ddp_init --wo", ["--world-size"]),
        ("%ddp_init -n 2 --wo", []),
        ("%ddp_init --backend ", ["auto", "gloo", "nccl"]),
        ("board = %ddp_init --backend n", ["nccl"]),
        ("%ddp_init --step --ba", ["--backend"]),
        ("%%ddp --ranks ", ["all", "0,2-3", "0", "1", "2", "3"]),
        ("%ddp_fault duplicate-r", ["duplicate-rank"]),
        ("%ddp_push b", ["batch", "bias"]),
        ("%ddp_bench --op all_reduce,b", ["all_reduce,broadcast", "all_reduce,barrier"]),
        ("%ddp_bench --dtype bfl", ["bfloat16"]),
        ("%ddp_step --to pro", ["process-group"]),
        ("%ddp_bench --budget ", []),
    ],
)
def test_what_tab_offers(line: str, expected: list[str]) -> None:
    assert complete(line, AROUND) == (line.rpartition(" ")[2], expected)


@pytest.mark.parametrize(
    "line",
    [
        "%ddp_ini",
        "%time x",
        "x = 3",
        "",
        "%ddp_run tr",
        "%ddp_replay ru",
        "%ddp_pull lo",
        "%ddp_status x",
        "%ddp_bench --export run",
        "%ddp_nothing --x",
    ],
)
def test_what_is_left_to_ipython(line: str) -> None:
    assert complete(line, AROUND) is None


@each_verb
def test_every_option_of_every_verb_is_offered(verb: Verb) -> None:
    completion = complete(f"%{verb.name} --", AROUND)
    assert completion is not None
    names = {name for action in verb.parser._actions for name in action.option_strings}
    assert set(completion[1]) == {name for name in names if name.startswith("--")}


@each_verb
def test_a_page_of_help_has_two_examples_that_parse(verb: Verb) -> None:
    page = verb.help_page()
    assert len(verb.examples) >= 2
    for call, purpose in verb.examples:
        assert f"  {call} " in page
        assert purpose in page
        typed, _, line = call.rpartition("= ")[2].partition(" ")
        if typed == verb.magic:
            verb.parser.read(line)
    assert verb.examples[0][0].startswith(verb.magic), "errors end with it"


@each_verb
def test_every_option_is_explained_and_its_name_in_the_arguments_is_known(verb: Verb) -> None:
    arguments = {action.dest for action in verb.parser._actions}
    for option in verb.options:
        assert option.help and option.attribute in arguments
