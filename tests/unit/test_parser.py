"""A line that the parser of a verb does not understand ends with the call that was meant."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from ddp_notebook.magics.verbs import VERBS

PARSERS = {verb.name: verb.parser for verb in VERBS}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("ddp_init --world_size 4", "%ddp_init --world-size 4"),
        ("ddp_init --world-sise=4", "%ddp_init --world-size 4"),
        ("ddp_init --world-sise", "%ddp_init --world-size N"),
        ("ddp_init \u2014world-size 2", "%ddp_init --world-size 2"),
        ("ddp_save \u201cmy run.json\u201d", '%ddp_save "my run.json"'),
        ("ddp --detatch", "%%ddp --detach"),
        ("ddp --stp collective", "%%ddp --step collective"),
        ("ddp_why --jsn", "%ddp_why --json"),
        ("ddp_init 4", ""),
        ("ddp_status x", ""),
        ("ddp_shutdown 3", ""),
        ("ddp_init --frobnicate", ""),
        ("ddp_save my run.json", ""),
    ],
)
def test_a_wrong_line_names_the_right_call(line: str, call: str) -> None:
    verb, _, rest = line.partition(" ")
    with pytest.raises(UsageError) as error:
        PARSERS[verb].read(rest)
    assert str(error.value).partition("Did you mean: ")[2].partition("   (all options")[0] == call


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddp --step", "--step needs a value. For example: %%ddp --step collective "),
        ("ddp_init 4", "%ddp_init does not take 4. For example: %ddp_init --world-size 4 "),
        (
            "ddp_wait --timeout soon",
            "--timeout needs a number, not 'soon'. For example: %ddp_wait --ti",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_a_call_that_has_the_option(line: str, words: str) -> None:
    verb, _, rest = line.partition(" ")
    with pytest.raises(UsageError) as error:
        PARSERS[verb].read(rest)
    assert words in str(error.value)


@pytest.mark.parametrize("line", ["print(rank)", "# on all ranks", "x = 3", "--ranks 0 x = 3"])
def test_code_on_the_line_of_a_cell_magic_is_sent_below_it(line: str) -> None:
    with pytest.raises(UsageError, match="Code and comments belong on the lines below %%ddp"):
        PARSERS["ddp"].read(line)
