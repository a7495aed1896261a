"""A line that the parser of a verb does not understand ends with the call that was meant."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from ddp_notebook.magics.verbs import VERBS

PARSERS = {verb.name: verb.parser for verb in VERBS}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("ddp_init 4", "%ddp_init --world-size 4"),
        ("ddp_init --world_size 4", "%ddp_init --world-size 4"),
        ("ddp_init --world-sise=4", "%ddp_init --world-size 4"),
        ("ddp_init world_size=2", "%ddp_init --world-size 2"),
        ("ddp_init -w 2", "%ddp_init --world-size 2"),
        ("ddp_init --nproc_per_node=2", "%ddp_init --world-size 2"),
        ("ddp_init gloo", "%ddp_init --backend gloo"),
        ("ddp_init \u2014world-size 2", "%ddp_init --world-size 2"),
        ("ddp 0", "%%ddp --ranks 0"),
        ("ddp 0,2-3", "%%ddp --ranks 0,2-3"),
        ("ddp all", "%%ddp --ranks all"),
        ("ddp -r 1", "%%ddp --ranks 1"),
        ("ddp rank 1", "%%ddp --ranks 1"),
        ("ddp --detatch", "%%ddp --detach"),
        ("ddp --stp collective", "%%ddp --step collective"),
        ("ddp_where 1", "%ddp_where --ranks 1"),
        ("ddp_restart 2", "%ddp_restart --ranks 2"),
        ("ddp_why --jsn", "%ddp_why --json"),
        ("ddp_why --js --stp", ""),
        ("ddp_status x", ""),
        ("ddp_shutdown 3", ""),
        ("ddp_init --frobnicate", ""),
    ],
)
def test_a_wrong_line_names_the_right_call(line: str, call: str) -> None:
    verb, _, rest = line.partition(" ")
    with pytest.raises(UsageError) as error:
        PARSERS[verb].read(rest)
    assert str(error.value).partition("Did you mean: ")[2].partition("   (all options")[0] == call


@pytest.mark.parametrize("line", ["print(rank)", "# on all ranks", "x = 3", "--ranks 0 x = 3"])
def test_code_on_the_line_of_a_cell_magic_is_sent_below_it(line: str) -> None:
    with pytest.raises(UsageError, match="Code and comments belong on the lines below %%ddp"):
        PARSERS["ddp"].read(line)
