"""Kernels of notebooks, in processes of their own, driven as front ends and nbclient drive them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbclient
from jupyter_client.manager import KernelManager
from support import Pids

_STARTS = 3


def _until_it_starts(start: Callable[[], None]) -> None:
    """Start again what dies before it answers: a port that was free when it was chosen may be
    another's when it is bound. Jupyter's server does the same."""
    for starts_left in reversed(range(_STARTS)):
        try:
            start()
        except RuntimeError as error:
            if "before replying" not in str(error) or not starts_left:
                raise
        else:
            return


def execute(notebook: Any, folder: Path, timeout_s: float, **options: Any) -> None:
    """Execute a notebook in `folder` as nbclient does; a cell may take `timeout_s`.

    `options` are the client's.
    """
    resources = {"metadata": {"path": str(folder)}}

    def run() -> None:
        nbclient.NotebookClient(
            notebook, timeout=timeout_s, kernel_name="python3", resources=resources, **options
        ).execute()

    _until_it_starts(run)


@dataclass
class Reply:
    """How a cell of a real kernel ended."""

    status: str
    """ok, error, or dead when the kernel did not live to say."""
    text: str
    """Everything it printed or displayed as text; a display that was updated, at its last."""
    ename: str = ""
    evalue: str = ""
    elapsed_s: float = 0.0
    ended_at: float = 0.0
    """time.monotonic() of the reply."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)


class Kernel:
    """A notebook kernel in a process of its own, driven as a front end does.

    Messages are read only in the methods, on the caller's thread. It works in a folder that has
    nothing to import, as those of executed notebooks do, and those of JupyterLab: what a warm one
    has loaded serves only notebooks that would load the same.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = {**os.environ, **(environment or {})}
        self.start()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a kernel; the one before, if any, must have ended."""

        def start() -> None:
            self.manager = KernelManager(kernel_name="python3")
            folder = Path(tempfile.gettempdir(), "kernels")
            folder.mkdir(exist_ok=True)
            self.manager.start_kernel(env=self.environment, cwd=str(folder))
            self._connect()

        _until_it_starts(start)

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.close(now=True)
            raise

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid: int = self.manager.provisioner.pid
        return pid

    def send(self, code: str) -> str:
        """Send a cell and do not wait for it; its message id."""
        message_id: str = self.client.execute(code)
        return message_id

    def run(self, code: str, timeout_s: float = 60) -> Reply:
        """Run a cell to its end."""
        return self.finish(self.send(code), timeout_s)

    def run_well(self, code: str, timeout_s: float = 60) -> Reply:
        """Run a cell that must end well."""
        reply = self.run(code, timeout_s)
        assert reply.status == "ok", f"{code!r} ended with {reply.evalue}\n{reply.text}"
        return reply

    def listen(self, message_id: str, timeout_s: float) -> Iterator[Mapping[str, Any]]:
        """What the kernel publishes for a cell, as it arrives; for `timeout_s`, or to its end."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=left_s)
            except queue.Empty:
                return
            if message["parent_header"].get("msg_id") != message_id:
                continue
            yield message
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return

    def read_for(self, duration_s: float) -> None:
        """Let time pass, reading what the kernel publishes as a front end would."""
        deadline = time.monotonic() + duration_s
        with contextlib.suppress(queue.Empty):
            while (left_s := deadline - time.monotonic()) > 0:
                self.client.get_iopub_msg(timeout=left_s)

    def wait_for_text(self, message_id: str, wanted: str, timeout_s: float = 60) -> None:
        """Read until the cell has shown `wanted`."""
        for message in self.listen(message_id, timeout_s):
            if wanted in seen_in(message):
                return
            assert message["msg_type"] != "error", "\n".join(message["content"]["traceback"])
        raise AssertionError(f"{wanted!r} did not appear within {timeout_s:g} s")

    def amounts_shown(self, message_id: str, mark: str) -> list[int]:
        """How often `mark` is in what is shown of a benchmark that runs, until it was three
        different numbers."""
        amounts: list[int] = []
        for message in self.listen(message_id, 60):
            seen = seen_in(message)
            if "<progress" in seen:
                amounts.append(seen.count(mark))
            if len(set(amounts)) >= 3:
                break
        return amounts

    def finish(self, message_id: str, timeout_s: float = 60) -> Reply:
        """Wait for the end of a cell that was sent."""
        started = time.monotonic()
        deadline = started + timeout_s
        while True:
            try:
                reply = self.client.get_shell_msg(timeout=min(0.5, deadline - time.monotonic()))
            except queue.Empty:
                if not self.manager.is_alive():
                    return Reply("dead", "", elapsed_s=time.monotonic() - started)
                if time.monotonic() < deadline - 0.5:
                    continue
                raise AssertionError(f"the cell did not end within {timeout_s:g} s") from None
            if reply["parent_header"].get("msg_id") == message_id:
                break
        ended_at = time.monotonic()
        messages = list(self.listen(message_id, 10))
        content = reply["content"]
        return Reply(
            status=content["status"],
            text=text_of_all(messages),
            ename=content.get("ename", ""),
            evalue=content.get("evalue", ""),
            elapsed_s=ended_at - started,
            ended_at=ended_at,
            messages=messages,
        )

    def init(self, world_size: int = 2) -> float:
        """`%load_ext` and `%ddp_init`, which must end well; seconds from sending to the end."""
        started = time.monotonic()
        self.run_well("%load_ext ddp_notebook")
        reply = self.run_well(f"%ddp_init --world-size {world_size}")
        return reply.ended_at - started

    def pids(self) -> Pids:
        """The processes of the kernel's session."""
        fields = self.ask(
            "testing.pids_of(get_ipython()._ddp_notebook_magics.session)",
            "from ddp_notebook import testing",
        )
        return Pids(**{**fields, "ranks": tuple(fields["ranks"])})

    def ask(self, expression: str, definitions: str = "") -> Any:
        """The value of an expression in the kernel, which must be writable as JSON."""
        reply = self.run_well(
            f"{definitions}\nimport json; print('answer', json.dumps({expression}))"
        )
        lines = [line for line in reply.text.splitlines() if line.startswith("answer ")]
        assert lines, f"{expression!r} printed {reply.text!r}, {len(reply.messages)} messages"
        return json.loads(lines[-1].removeprefix("answer "))

    def warm(self) -> int:
        """Load the extension; the fork server's process, once it has torch."""
        self.run_well("%load_ext ddp_notebook")
        server = "get_ipython()._ddp_notebook_magics.session.pool.fork_server"
        pid: int = self.ask(f"({server}.ready.result(60), {server}.pid)[1]")
        return pid

    def kill(self) -> None:
        """End the kernel's process with SIGKILL, and nothing else."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, *, now: bool) -> None:
        """What a front end does on "restart kernel"."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def close(self, *, now: bool = False) -> None:
        """Shut the kernel down, and forget it."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()


def text_of(message: Mapping[str, Any]) -> str:
    """The text in one message of a kernel."""
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    return str(content.get("data", {}).get("text/plain", ""))


def seen_in(message: Mapping[str, Any]) -> str:
    """Everything that a front end might show of one message, whatever its form."""
    data = message["content"].get("data", {})
    rich = [value for value in data.values() if isinstance(value, str)]
    return "\n".join([text_of(message), *rich])


def text_of_all(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a reader of the cell sees as text: of a display that was updated, the last."""
    parts: list[tuple[str, str]] = []
    for message in messages:
        shown_as = message["content"].get("transient", {}).get("display_id", "")
        # A stream comes in pieces, cut anywhere; everything else has lines of its own.
        text = text_of(message) + ("" if message["msg_type"] == "stream" else "\n")
        if message["msg_type"] == "update_display_data":
            parts = [(i, text if i == shown_as else old) for i, old in parts]
        else:
            parts.append((shown_as, text))
    return "".join(text for shown_as, text in parts if text != "\n" or not shown_as)
