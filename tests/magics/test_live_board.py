"""The live board in a real kernel: what a page is sent, and buttons that work while a cell runs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel
from support import lacking

from ddp_notebook.archive.replay import Replay
from ddp_notebook.board.timeline import PAUSED, PHASES
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Phase

WIDGET = "application/vnd.jupyter.widget-view+json"
WITHIN_S = 40.0


class Page:
    """A front end's side of the board: it keeps what it is sent, and says what a page says."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.model = ""
        self.state: dict[str, Any] = {}
        self.told: list[Mapping[str, Any]] = []
        self.outputs: list[Mapping[str, Any]] = []
        self.printed = ""
        self.executed: list[str] = []
        self.idle: set[str] = set()

    def read_until(self, wanted: Callable[[], bool], what: str) -> None:
        """Read what the kernel publishes until `wanted` holds."""
        deadline = time.monotonic() + scaled_for_load(WITHIN_S)
        while not wanted():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{what}: not within {WITHIN_S:g} s; {self.seen}"
            try:
                self._read(self.kernel.client.get_iopub_msg(timeout=left_s))
            except queue.Empty:
                continue

    def _read(self, message: Mapping[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "comm_open":
                state = content["data"].get("state", {})
                if "still" in state:
                    self.model, self.state = content["comm_id"], dict(state)
            case "comm_msg" if content["comm_id"] == self.model:
                data = content["data"]
                if data["method"] == "update":
                    self.state.update(data["state"])
                elif data["method"] == "custom":
                    self.told.append(data["content"])
                    self.state.update(data["content"].get("values", {}))
            case "display_data" | "update_display_data":
                self.outputs.append(content["data"])
            case "stream":
                self.printed += content["text"]
            case "execute_input":
                self.executed.append(content["code"])
            case "status" if content["execution_state"] == "idle":
                self.idle.add(message["parent_header"].get("msg_id", ""))

    def phases(self, rank: int) -> list[int]:
        """Of the collectives of a rank, in the order in which they were told."""
        told = [message["slices"] for message in self.told if message["kind"] == "slices"]
        return [each[6] for slices in told for each in slices if each[0] == rank]

    def run(self, code: str) -> None:
        """Run a cell to its end."""
        sent = self.kernel.send(code)
        self.read_until(lambda: sent in self.idle, code)

    def say(self, **content: Any) -> None:
        """What a page says to its board."""
        client = self.kernel.client
        data = {"method": "custom", "content": content}
        message = client.session.msg("comm_msg", {"comm_id": self.model, "data": data})
        client.shell_channel.send(message)

    def press(self, magic: str) -> Mapping[str, Any]:
        """Press the button of `magic`; what it gave."""
        # An answer is sent again when it has become old: the next one has a number of its own.
        before = max((each["number"] for each in self.state["answers"]), default=0)
        self.say(kind="do", magic=magic)

        def answered() -> bool:
            newest = max(self.state["answers"], key=lambda each: each["number"], default=None)
            return (
                newest is not None
                and newest["number"] > before
                and newest["magic"] == magic
                and magic not in self.state["busy"]
            )

        self.read_until(answered, f"{magic} pressed, {before} answers before")
        answer: Mapping[str, Any] = self.state["answers"][0]
        return answer

    @property
    def seen(self) -> str:
        """The state without the script, what was told and what was printed."""
        state = {k: v for k, v in self.state.items() if not k.startswith("_")}
        told = [(each["kind"], len(each.get("slices", ()))) for each in self.told]
        return f"{json.dumps(state)}; told {told}; printed {self.printed[-2000:]}"

    @property
    def roles(self) -> list[str]:
        return [row["role"] for row in self.state.get("board", {}).get("rows", ())]


OLDEST_IPYKERNEL = ("ipykernel==6.29.5", "nest-asyncio")


@pytest.fixture(scope="module", params=["installed", "oldest"])
def ipykernel_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH under which a kernel has the ipykernel that is meant."""
    if request.param == "installed":
        return ""
    folder = tmp_path_factory.mktemp("oldest") / "site-packages"  # as libraries are told by name
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    done = subprocess.run([*command, *OLDEST_IPYKERNEL], capture_output=True, text=True)
    if done.returncode != 0:
        lacking(f"no ipykernel 6: {done.stderr}")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


SLOW_TORCH = """
import pathlib, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            while not pathlib.Path({flag!r}).exists():
                time.sleep(0.05)
if "ddp_notebook.launch.fork_server" in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, Slow())
"""


def test_while_torch_loads_for_long_the_board_says_so_and_the_kernel_is_heard(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "loaded"
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH.format(flag=str(flag)))
    with Kernel({"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}) as kernel:
        page = Page(kernel)
        page.run("%load_ext ddp_notebook")
        cell = kernel.send("%ddp_init --world-size 2 --device cpu")
        page.read_until(lambda: bool(page.state.get("board", {}).get("loading")), "loading")
        loading = page.state["board"]["loading"]
        assert loading["since_us"] > 0
        assert "torch is being loaded" in page.state["board"]["headline"]
        page.told.clear()
        page.read_until(lambda: [m["kind"] for m in page.told].count("beat") > 1, "signs of life")
        assert cell not in page.idle and page.state["board"]["loading"]
        flag.touch()
        page.read_until(lambda: cell in page.idle, "the ranks are up")
        page.read_until(lambda: page.roles == ["ready", "ready"], "both ranks ready")
        assert page.state["board"]["loading"] is None


@contextlib.contextmanager
def two_ranks(path: str = "") -> Iterator[Page]:
    """A board of two ranks that are ready, in a kernel of its own."""
    with Kernel({"PYTHONPATH": path} if path else None) as kernel:
        made = Page(kernel)
        made.run("%load_ext ddp_notebook")
        made.run("%ddp_init --world-size 2 --device cpu")
        made.read_until(lambda: made.roles == ["ready", "ready"], "both ranks ready")
        yield made


@pytest.fixture(scope="module")
def page(nothing_left_behind_by_the_module: None, ipykernel_path: str) -> Iterator[Page]:
    """A board for the tests that start no process and end none, with either ipykernel."""
    with two_ranks(ipykernel_path) as made:
        if ipykernel_path:
            silent = made.kernel.client.execute(
                "import ipykernel; assert ipykernel.__version__ == '6.29.5'; print('oldest')",
                silent=True,
            )
            made.read_until(lambda: silent in made.idle, "the version")
            assert "oldest" in made.printed
        yield made


LOOP = """%%ddp
import pathlib, time
stop = torch.zeros(1)
while not stop:
    stop = torch.tensor([float(pathlib.Path({flag!r}).exists())])
    dist.all_reduce(stop)  # or a rank would leave the others behind
    time.sleep(0.02)"""


def test_buttons_work_while_a_cell_runs_and_later_cells_keep_their_order(
    page: Page, tmp_path: Path
) -> None:
    flag = tmp_path / "go-on"
    loop = LOOP.format(flag=str(flag))
    cell = page.kernel.send(loop)
    page.read_until(lambda: any(m["kind"] == "slices" and m["slices"] for m in page.told), "slices")
    later = [page.kernel.send(f"order = {n}") for n in range(3)]

    where = page.press("%ddp_where")
    assert where["ok"] and "cell 3, line" in where["text"]
    refused = page.press("%ddp_step --ranks 9")
    assert not refused["ok"] and "Rank 9 does not exist" in refused["text"]
    foreign = page.press("%ddp_shutdown")
    assert not foreign["ok"] and "no button" in foreign["text"]
    assert cell not in page.idle, "all of that happened while the cell was running"
    assert page.executed[-1] == loop

    info = page.kernel.client.kernel_info()
    page.read_until(lambda: info in page.idle, "what a page asks that was loaded anew")
    assert cell not in page.idle and page.executed[-1] == loop

    flag.touch()
    page.read_until(lambda: later[-1] in page.idle, "the cells that were sent meanwhile")
    assert page.executed[-3:] == [f"order = {n}" for n in range(3)]


def test_a_page_that_comes_late_gets_all_slices_and_the_past(page: Page) -> None:
    page.run("%%ddp\nfor n in range(5):\n    dist.all_reduce(torch.ones(4))")

    def has_all() -> bool:
        # What a drawing under way had not seen yet comes as news after the answer.
        told = [each for each in page.told if each["kind"] == "slices"]
        kinds = {
            n: kind for each in told for n, kind in enumerate(each["kinds"], each["first_kind"])
        }
        last_run = max((each["run"] for each in told), default=0)
        slices = {
            (rank, n)
            for each in told
            for rank, n, kind, *_ in each["slices"]
            if kind in kinds and kinds[kind][-1] == last_run
        }
        return len(slices) == 2 * 5 and any(each["first_kind"] == 0 for each in told)

    page.told.clear()
    page.say(kind="hello", view="late")
    page.read_until(has_all, "all slices")
    kinds = {kind[0] for each in page.told for kind in each.get("kinds", ())}
    assert kinds == {"all_reduce"}

    page.told.clear()
    page.read_until(lambda: any(m["kind"] == "beat" for m in page.told), "a sign of life")
    # Each message has the number of the last change, also one that brings none.
    told = [each["told"] for each in page.told]
    changes = [each["kind"] in ("state", "slices") for each in page.told]
    assert [b - a for a, b in pairwise(told)] == changes[1:]

    page.say(kind="at", view="late", at=0)
    page.read_until(lambda: any(m["kind"] == "past" for m in page.told), "the past")
    past = next(m for m in page.told if m["kind"] == "past")
    assert past["view"] == "late"
    assert past["board"]["world_size"] == 2
    assert any(row["status"] != "ready" for row in past["board"]["rows"])


@pytest.fixture
def own_page() -> Iterator[Page]:
    """A board for one test alone."""
    with two_ranks() as made:
        yield made


def test_a_hang_is_given_up_a_dead_rank_restarted_and_in_the_end_all_is_still(
    own_page: Page,
) -> None:
    page = own_page
    page.run("%%ddp\nif rank == 0:\n    dist.all_reduce(torch.ones(1))")
    page.read_until(lambda: bool(page.state["findings"]), "the finding")
    assert page.roles == ["culprit", "ready"]
    assert page.state["locations"][0]["ranks"] == "0"
    assert [3, "    dist.all_reduce(torch.ones(1))"] in page.state["locations"][0]["lines"]
    why = page.press("%ddp_why")
    assert why["ok"] and page.state["findings"][0]["sentence"] in " ".join(why["text"].split())
    assert page.press("%ddp_abort")["ok"]
    page.read_until(lambda: page.roles == ["ready", "ready"], "both ranks free")
    page.read_until(lambda: not page.state["findings"], "no finding any more")

    cell = "work = dist.all_reduce(torch.ones(1), async_op=True)\nimport os; os._exit(3)"
    page.run(f"%%ddp --ranks 1\n{cell}")
    page.read_until(lambda: "exited with code 3" in page.state["board"]["rows"][1]["text"], "dead")
    page.read_until(lambda: PHASES.index(Phase.FAILED) in page.phases(rank=1), "its last bar ends")
    restart = next(a for a in page.state["actions"] if a["name"] == "restart")
    assert restart["magic"] == "%ddp_restart --ranks 1" and not restart["why_not"]
    assert page.press(restart["magic"])["ok"]
    page.read_until(lambda: page.roles == ["ready", "ready"], "rank 1 is back")

    page.run("%ddp_shutdown")
    page.read_until(lambda: page.state["actions"] == [], "no buttons")
    assert page.state["board"]["closed"] and page.roles == ["ended", "ended"]
    ended_us = page.state["board"]["now"]
    page.told.clear()
    page.say(kind="do", magic="%ddp_why")
    page.say(kind="hello", view="late")
    page.read_until(lambda: any(each["kind"] == "slices" for each in page.told), "all the same")
    page.say(kind="here", view="late")
    page.read_until(lambda: page.told[-1]["kind"] == "beat", "a sign of life after the end")
    assert page.state["busy"] == []
    # Ages are those of the last known state, whenever a page is loaded.
    assert {each["now"] for each in page.told} == {ended_us}


def test_while_a_job_is_attached_the_board_shows_that(page: Page, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no rows\n")
    page.run(f"%ddp_attach {log}")
    page.read_until(lambda: "logs of rank 1" in page.state["board"]["headline"], "that job")
    board = page.state["board"]
    assert "job.log" in board["aside"] and "job.log" in board["what"]
    assert board["run"] == "attached" and page.roles == ["ended", "ended"]
    assert [action["label"] for action in page.state["actions"]] == ["Look again"]
    page.run("%ddp_detach")
    page.read_until(lambda: page.roles == ["ready", "ready"], "its own ranks again")
    assert not page.state["board"]["aside"]


def test_a_cell_on_the_ranks_may_await(page: Page) -> None:
    page.run("%%ddp\nimport asyncio\nawait asyncio.sleep(0)\nprint('awaited', rank)")
    page.read_until(
        lambda: "awaited" in page.printed + json.dumps(page.outputs), "what the ranks printed"
    )


def test_ranks_are_stepped_by_the_button(page: Page) -> None:
    page.run("%%ddp --step collective\nprint('begun')\ndist.barrier()\nprint('over')")
    page.read_until(lambda: page.roles == ["paused", "paused"], "both paused")
    step = page.press("%ddp_step --ranks 0")
    assert step["ok"] and "waiting" in step["text"]
    page.read_until(lambda: page.roles[0] == "waiting", "rank 0 waits")
    assert page.state["board"]["rows"][0]["waits_for"] == "1"
    page.told.clear()
    end = page.press("%ddp_step --to end")
    assert end["ok"] and "over" in end["text"]
    page.read_until(lambda: page.roles == ["ready", "ready"], "the cell is over")
    page.read_until(lambda: PHASES.index(Phase.DONE) in page.phases(rank=1), "the barrier is done")
    told = [each for message in page.told for each in message.get("slices", ())]
    issued, done, _, held = [each for each in told if each[0] == 1][-1][4:8]
    assert held > 1000 * 300 > done - issued, "it was held, and did not communicate all the time"


def test_a_pause_at_a_line_is_held_time_on_the_board_and_in_a_saved_run(
    page: Page, tmp_path: Path
) -> None:
    page.told.clear()

    def pauses() -> list[list[int]]:
        told = [each for message in page.told for each in message.get("slices", ())]
        return [[each[0], *each[4:7]] for each in told if each[1] < 0]

    page.run("%%ddp\nif rank == 1:\n    breakpoint()\ndist.barrier()")
    page.read_until(lambda: len(pauses()) == 1, "the pause begins")
    assert page.press("%ddp_step --to end")["ok"]
    page.read_until(lambda: page.roles == ["ready", "ready"], "the cell is over")
    page.read_until(lambda: len(pauses()) == 2, "the pause ends")
    begun, over = pauses()
    assert begun == [1, begun[1], 0, PHASES.index(Phase.HELD)]
    assert over == [1, begun[1], over[2], PHASES.index(PAUSED)] and over[2] > begun[1]
    path = tmp_path / "run.json"
    page.run(f"%ddp_save {path}")
    (saved,) = Replay.read(path).saved.pauses
    assert (saved.ended_ns - saved.began_ns) // 1000 == pytest.approx(over[2] - over[1], abs=2)
    assert (saved.rank, saved.place.line, saved.place.text) == (1, 3, "breakpoint()")


def test_a_benchmark_is_shown_and_cancelled_by_the_button(page: Page) -> None:
    cell = page.kernel.send("result = %ddp_bench --budget 300s")
    page.read_until(lambda: page.state["benchmark"].get("percent", 0) > 0, "a benchmark")
    assert page.state["benchmark"]["what"] == "all_reduce"
    assert [row["text"] for row in page.state["board"]["rows"]] == ["the benchmark"] * 2
    (cancel,) = [each for each in page.state["actions"] if each["label"] == "Cancel"]
    assert "I, I" in cancel["magic"]
    assert "abort" not in {each["name"] for each in page.state["actions"]}
    assert cell not in page.idle, "it still runs"

    answer = page.press(cancel["magic"])
    assert answer["ok"] and "What is measured is kept" in answer["text"]
    page.read_until(lambda: cell in page.idle, "the cell has ended")
    page.read_until(lambda: page.roles == ["ready", "ready"], "both ranks free")
    page.read_until(lambda: page.state["benchmark"] == {}, "no benchmark any more")
    assert page.kernel.ask("result.ended") == "it was interrupted"
    assert page.kernel.ask("len(result.points)") > 0
    page.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2")
    late = page.press(cancel["magic"])
    assert not late["ok"] and "No benchmark is running" in late["text"]


def test_a_benchmark_of_steps_is_cancelled_before_it_has_begun_on_the_ranks(page: Page) -> None:
    cell = page.kernel.send("%ddp_bench --model mlp --budget 300s")
    page.read_until(lambda: page.state["benchmark"] != {}, "a benchmark")
    assert page.state["benchmark"]["what"] == "training steps of mlp"
    assert page.press("interrupt the cell: I, I")["ok"]
    page.read_until(lambda: cell in page.idle, "the cell has ended")
    page.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2")


def test_the_notebook_keeps_a_picture_beside_the_widget(page: Page) -> None:
    """What GitHub, nbconvert and a page without scripts show, in an output of its own."""
    widget = next(each for each in page.outputs if WIDGET in each)
    assert widget["text/plain"] == ""
    mark = f'class="ddp-still-{page.state["still"]}"'

    def pictures() -> list[Mapping[str, Any]]:
        return [each for each in page.outputs if mark in each.get("text/html", "")]

    page.read_until(lambda: "✓ ready" in [{}, *pictures()][-1].get("text/html", ""), "picture")
    picture = pictures()[-1]
    assert WIDGET not in picture and "2 ranks, gloo" in picture["text/plain"]
