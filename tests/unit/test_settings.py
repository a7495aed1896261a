"""`--set`, which ranks can be set up again in place, and what a rank finds wrong in its values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import format_ranks
from ddp_notebook.session.options import InitOptions, parse_settings

# --------------------------------------------------------------------------- --set


def test_a_setting_is_for_a_rank_set_and_an_empty_value_unsets() -> None:
    assert parse_settings(["1:MASTER_PORT=23457"], 4) == {1: {"MASTER_PORT": "23457"}}
    assert parse_settings(["0,2-3:A="], 4) == {rank: {"A": ""} for rank in (0, 2, 3)}
    assert parse_settings(["all:A=1"], 2) == {0: {"A": "1"}, 1: {"A": "1"}}
    assert parse_settings([], 2) == {}


def test_a_value_may_hold_colons_and_equal_signs() -> None:
    assert parse_settings(["0:URL=tcp://h:1?a=b"], 1) == {0: {"URL": "tcp://h:1?a=b"}}


def test_of_two_settings_of_one_variable_the_later_counts() -> None:
    assert parse_settings(["all:A=1", "1:A=2", "1:B=3"], 2) == {
        0: {"A": "1"},
        1: {"A": "2", "B": "3"},
    }


@pytest.mark.parametrize(
    "text", ["MASTER_PORT=1", "1:MASTER_PORT", "1:=1", "1:2=3", "1:A B=1", "", ":"]
)
def test_what_is_no_setting_says_how_one_is_written(text: str) -> None:
    with pytest.raises(UsageMistake, match=r"is not RANKS:NAME=value.*--set 1:MASTER_PORT=23457"):
        parse_settings([text], 4)


@pytest.mark.parametrize("text", ["4:A=1", "x:A=1", ":A=1", "3-1:A=1"])
def test_ranks_that_are_none_are_said_with_the_setting(text: str) -> None:
    with pytest.raises(UsageMistake) as caught:
        parse_settings([text], 4)
    assert str(caught.value).startswith(f"--set {text!r}: ")


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.dictionaries(st.sampled_from(["A", "RANK", "_x1"]), st.text(), min_size=1),
    )
)
def test_settings_that_are_written_are_read_back(settings: dict[int, dict[str, str]]) -> None:
    texts = [
        f"{format_ranks((rank,))}:{name}={value}"
        for rank, values in settings.items()
        for name, value in values.items()
    ]
    assert parse_settings(texts, 8) == settings


def test_a_setting_of_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageMistake, match="--set names rank 2: world size is 2, so ranks are "):
        InitOptions(world_size=2, settings={2: {"A": "1"}})


# --------------------------------------------------------------------------- again, in place

PROCESSES = {
    "world_size": 2,
    "device": "cpu",
    "gpus": ("0",),
    "launcher": "process",
    "threads_per_rank": 3,
}
STORE = {"init_method": "tcp", "master_addr": "localhost", "master_port": 23457}
NEITHER = {
    "timeout_s": 7.0,
    "store": "rank0",
    "step": True,
    "settings": {0: {"A": "1"}},
    "backend": "gloo",
}


@pytest.mark.parametrize("name", [*PROCESSES, *STORE, *NEITHER])
def test_what_needs_new_processes_or_another_store_and_what_does_not(name: str) -> None:
    one = InitOptions()
    other = replace(one, **{name: {**PROCESSES, **STORE, **NEITHER}[name]})  # type: ignore[arg-type]
    assert one.same_processes(other) is other.same_processes(one) is (name not in PROCESSES)
    assert one.same_store(other) is other.same_store(one) is (name not in STORE)


def test_options_are_the_same_as_themselves() -> None:
    one = InitOptions()
    assert one.same_processes(InitOptions())
    assert one.same_store(InitOptions())


@pytest.mark.parametrize("store", ["mine", ""])
def test_a_store_that_is_none_is_refused(store: str) -> None:
    with pytest.raises(UsageMistake, match="--store must be one of session, rank0"):
        InitOptions(store=store)


# --------------------------------------------------------------------------- on the rank

ON_A_RANK = """
import json, os, sys
from types import SimpleNamespace
from ddp_notebook.rank.setup import settings
from ddp_notebook.rank.setup.errors import StageError

changes = settings.Settings()
os.environ["RANK"], os.environ["KEPT"] = "of the shell", "kept"
found = []
for change in json.loads(sys.argv[1]):
    plan = SimpleNamespace(**{
        "rank": 1, "world_size": 3, "backend": "gloo", "init_method": "env", "timeout_s": 60.0,
        "master_addr": "127.0.0.1", "master_port": 29500, "store_path": "/tmp/p",
        "store": "session", "settings": {}, "threads": 1, "local": None, **change})
    changes.apply(plan)
    came = settings.read(plan)
    try:
        settings.check(came, plan)
        said = ""
    except StageError as error:
        said = f"{error.category}|{error.cause}|{error.remedy}"
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "KEPT", "TORCHELASTIC_USE_AGENT_STORE")
    found.append([
        said,
        {name: os.environ.get(name) for name in names},
        {"rank": came.rank, "port": came.master_port, "hosts": came.hosts_store,
         "path": came.path, "backend": came.backend, "timeout_s": came.timeout_s},
    ])
print(json.dumps(found))
"""


def on_a_rank(*changes: dict[str, object]) -> list[list[object]]:
    """What a rank that is told these plans, one after the other, says and has: in one process."""
    import json

    run = [sys.executable, "-c", ON_A_RANK, json.dumps(changes)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result: list[list[object]] = json.loads(done.stdout)
    return result


WRONG = {
    "RANK is 'x', but must be a number.": {"RANK": "x"},
    "RANK is not set.": {"RANK": ""},
    "WORLD_SIZE is 0, but must be at least 1.": {"WORLD_SIZE": "0"},
    "RANK is 3, but with WORLD_SIZE 3 it must be 0 to 2.": {"RANK": "3"},
    "RANK is -1, but with WORLD_SIZE 3 it must be 0 to 2.": {"RANK": "-1"},
    "MASTER_PORT is 123456, but ports go from 1 to 65535.": {"MASTER_PORT": "123456"},
    "MASTER_PORT is 0, but ports go from 1 to 65535.": {"MASTER_PORT": "0"},
    "MASTER_PORT is '29500 ', but must be a number.": {"MASTER_PORT": "29500 "},
    "MASTER_ADDR is not set.": {"MASTER_ADDR": ""},
}


def test_a_rank_checks_what_it_finds_and_each_set_up_begins_with_what_the_launcher_told() -> None:
    rank0 = {"rank": 0, "store": "rank0"}
    plans: list[dict[str, object]] = [
        {},
        *({"settings": values} for values in WRONG.values()),
        {"settings": {"KEPT": "", "BACKEND": "nccl", "TIMEOUT": "3"}},
        rank0,
        {**rank0, "settings": {"RANK": "1"}},
        {"init_method": "file", "settings": {"MASTER_PORT": "x", "STORE_PATH": "/tmp/q"}},
        {"init_method": "tcp", "settings": {"MASTER_PORT": "x"}},
        {},
    ]
    found = on_a_rank(*plans)
    healthy, last = found[0], found[-1]
    assert healthy == [
        "",
        {
            "RANK": "1",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "KEPT": "kept",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
        {
            "rank": 1,
            "port": 29500,
            "hosts": False,
            "path": "",
            "backend": "gloo",
            "timeout_s": 60.0,
        },
    ]
    assert last == healthy, "what one setup changed is put back by the next"

    rights = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    for (cause, values), (said, _, _) in zip(WRONG.items(), found[1:], strict=False):
        (name,) = values
        remedy = (
            "Leave MASTER_PORT to the launcher, which finds a free port at each start: %ddp_init"
        )
        if name in rights:
            remedy = (
                f"Set {name}={rights[name]} on this rank, or leave it to the launcher: %ddp_init"
            )
        assert said == f"env-invalid|{cause}|{remedy}"

    changed, host, not_host, file, tcp = found[1 + len(WRONG) : -1]
    assert changed[0] == ""
    assert changed[1]["KEPT"] is None  # type: ignore[index]
    assert (changed[2]["backend"], changed[2]["timeout_s"]) == ("nccl", 3.0)  # type: ignore[index]
    assert host[2]["hosts"] is True  # type: ignore[index]
    assert host[1]["TORCHELASTIC_USE_AGENT_STORE"] is None  # type: ignore[index]
    assert not_host[2]["hosts"] is False  # type: ignore[index]
    assert (file[0], file[2]["path"]) == ("", "/tmp/q")  # type: ignore[index]
    assert (tcp[0], tcp[2]["port"]) == ("", 29500), "tcp:// has the port in its address"  # type: ignore[index]
