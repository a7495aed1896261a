"""What a loop of the user's waits for, read off its source: a key, a collective, or nothing."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.polling import (
    Polled,
    polled,
    polled_file,
)

STORE = dist.HashStore()


def asked(source: str, line: int = 3, **names: Any) -> Polled:
    """What is polled where a cell is at this line, its magic the first."""
    return polled(frame_at(source, line, **names), UserCode())


def asked_file(source: str, **names: Any) -> str:
    return polled_file(frame_at(source, 2, **names), UserCode())


def frame_at(source: str, line: int, **names: Any) -> Any:
    text = f"%%ddp\n{textwrap.dedent(source).strip()}\n"
    name = "<ddp cell 7>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    frame: Any = SimpleNamespace(
        f_code=SimpleNamespace(co_filename=name),
        f_lineno=line,
        f_globals={},
        f_locals={"store": STORE, **names},
        f_back=None,
    )
    return frame


@pytest.mark.parametrize(
    "loop",
    [
        "while not store.check(['ready']):\n    time.sleep(1)",
        "while not store.check([key]): time.sleep(1); n += 1",
        "while not gate.store.check([f'{key}']):\n    print('waiting')",
        "while True:\n    if store.check(['ready']):\n        break\n    time.sleep(0.1)",
    ],
)
def test_a_loop_that_only_asks_whether_a_key_is_there_waits_for_it(loop: str) -> None:
    found = asked(loop, 2, key="ready", gate=SimpleNamespace(store=STORE))
    assert found == Polled(key="ready")


@pytest.mark.parametrize(
    "loop",
    [
        "while store.check(['ready']): pass",
        "while store.get('ready') != b'2': pass",
        "while int(store.add('ready', 0)) < 3: sleep(1)",
    ],
)
def test_a_loop_that_asks_for_a_value_of_a_key_waits_for_it_too(loop: str) -> None:
    assert asked(loop, 2) == Polled("ready")


@pytest.mark.parametrize(
    "loop",
    [
        "while not work.is_completed():\n    pass",
        "while not all(w.is_completed() for w in works):\n    time.sleep(0.01)",
        "while True:\n    if work.is_completed():\n        return\n    sleep(1)",
    ],
)
def test_a_loop_that_asks_whether_a_collective_is_done_waits_for_it(loop: str) -> None:
    assert asked(loop, 2) == Polled(collective=True)


@pytest.mark.parametrize(
    "loop",
    [
        "while not store.check(['stop']):\n    train_step()",
        "while not store.check(['ready']) and time.time() < deadline:\n    sleep(1)",
        "while not store.check(['ready']) and n < 100:\n    n += 1",
        "while not store.check(['ready']):\n    if time.time() > end:\n        raise TimeoutError",
        "for _ in range(100):\n    if store.check(['ready']):\n        break",
        "while not work.is_completed():\n    x = x @ x.tanh()",
        "while not work.is_completed() and not done:\n    pass",
        "while not cache.check(['ready']):\n    sleep(1)",
        "while True:\n    if store.check(['stop']):\n        break\n    loss = step()",
        "while not ready():\n    sleep(1)",
        "while (:",
    ],
)
def test_a_loop_that_does_more_or_ends_by_itself_is_left_alone(loop: str) -> None:
    assert asked(loop, 2, cache=SimpleNamespace()) == Polled()


@pytest.mark.parametrize(
    "path",
    [
        "name",
        "'/data/ready-1'",
        "f'/data/ready-{rank}'",
        "folder / 'ready-1'",
        "os.path.join(folder, f'ready-{rank}')",
        "Path('/data', 'ready-1')",
        "'/data/' + 'ready-1'",
    ],
)
def test_the_file_for_which_a_loop_waits_is_known_however_its_path_is_made(path: str) -> None:
    names = {"name": "/data/ready-1", "rank": 1, "folder": Path("/data")}
    for loop in (f"while not os.path.exists({path}): pass", f"while not ({path}).is_file(): pass"):
        assert asked_file(loop, **names) == "/data/ready-1"


def test_a_path_that_the_users_code_would_have_to_make_is_not_known() -> None:
    for path in ("made()", "folder / made()", "f'{made}'", "f'{rank:03}'", "paths[0]", "rank"):
        assert asked_file(f"while not exists({path}): pass", rank=1, folder=Path("/d")) == ""
    assert asked_file("while exists(name): pass", name=__file__) == ""
