"""A line that the parser of a verb does not understand ends with the call that was meant."""

from __future__ import annotations

from pathlib import Path

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
        ("ddp_step \u2014ranks 0, 1 \u2013\u2013to end", "%ddp_step --ranks 0,1 --to end"),
        ("ddp_bench --budget 10 s", "%ddp_bench --budget 10s"),
        ("ddp_bench --max 4 MiB", "%ddp_bench --max 4MiB"),
        ("ddp_save my run.json", '%ddp_save "my run.json"'),
        ("ddp_save my run.json --output", '%ddp_save "my run.json" --output'),
        ("ddp_save \u201cmy run.json\u201d", '%ddp_save "my run.json"'),
        ("ddp_replay the last run.json", '%ddp_replay "the last run.json"'),
        ("ddp_save run.json force", "%ddp_save --force"),
        ("ddp_save run.json # before", ""),
        ("ddp --ranks 0 1", "%%ddp --ranks 0,1"),
        ("ddp --ranks (0, 1) --detach", "%%ddp --ranks 0,1 --detach"),
        ("ddp ranks 1", "%%ddp --ranks 1"),
        ("ddp_init --ranks 4", "%ddp_init --world-size 4"),
        ("ddp_init --ranks 0-3", "%ddp_init --world-size N"),
        ("ddp_break cell 3:7", '%ddp_break "cell 3:7"'),
        ("ddp_break train.py line 42 --once", "%ddp_break train.py:42 --once"),
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
        ("ddp --step", "expected one argument. For example: %%ddp --step collective "),
        ("ddp_init --timeout 30s", "--timeout is in seconds, without a unit. Type: --timeout 30 "),
        ("ddp_wait --timeout 2min", "Type: --timeout 120 "),
        ("ddp_wait --timeout soon", "invalid float value: 'soon'. For example: %ddp_wait --timeou"),
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


@pytest.mark.parametrize("typed", ["my runs/it's 1.json", "my runs", "my runs/"])
def test_a_name_with_spaces_that_there_is_is_shown_in_quotes(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my runs").mkdir()
    (tmp_path / "my runs" / "it's 1.json").touch()
    for verb in ("ddp_run", "ddp_attach"):
        for more in ("", " --epochs 2"):
            quoted = f' A name with spaces needs quotes: %{verb} "{typed}"{more}'
            assert PARSERS[verb].about_spaces(f"{typed}{more}".replace("'", "\\'")) == quoted
            assert PARSERS[verb].about_spaces(f'"{typed}"{more}') == ""
    assert PARSERS["ddp_where"].about_spaces("my runs") == ""
