"""What Tab offers on the line of a magic."""

from __future__ import annotations

import pytest

from ddp_notebook.magics.completion import Surroundings, complete
from ddp_notebook.magics.examples import EXAMPLES
from ddp_notebook.magics.parsing import PARSERS, parser_of
from ddp_notebook.model import RankState, Status

STATES = (Status.READY, Status.DEAD, Status.READY, Status.READY)
AROUND = Surroundings(
    names=("batch", "bias", "lr"),
    ranks=tuple(RankState(rank, status=status) for rank, status in enumerate(STATES)),
)


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
    found = complete(line, AROUND)
    assert found is not None
    assert found == (line.rpartition(" ")[2], expected)


@pytest.mark.parametrize(
    "line",
    [
        "%ddp_ini",
        "%time x",
        "x = 3",
        "",
        "%ddp_run tr",
        "%ddp_replay ru",
        "%ddp_bench --export run",
        "%ddp_nothing --x",
    ],
)
def test_what_is_left_to_ipython(line: str) -> None:
    assert complete(line, AROUND) is None


def test_every_option_of_every_verb_is_offered() -> None:
    for name in PARSERS:
        found = complete(f"%{name} --", AROUND)
        assert found is not None
        assert set(found[1]) == {each for each in parser_of(name).options if each.startswith("--")}


@pytest.mark.parametrize("name", PARSERS)
def test_a_page_of_help_has_two_examples_that_parse(name: str) -> None:
    page = parser_of(name).format_help()
    assert len(EXAMPLES[name]) >= 2
    for call, what in EXAMPLES[name]:
        assert f"  {call} " in page
        assert what in page
        verb, _, line = (
            call.partition("= ")[2].partition(" ") if "= " in call else (call.partition(" "))
        )
        if verb.lstrip("%") == name:
            parser_of(name).read(line)
