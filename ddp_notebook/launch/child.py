"""The first steps of a child of the fork server: output, environment, random seeds, its calls.

A child is described by a `spec`, a JSON object:

    {"calls": [["module:function", {keyword arguments}], ...],   run in order
     "env": {...}, "cwd": "...", "log": "path of stdout and stderr",
     "errors": "path of stderr, where it has one of its own",
     "namespaces": {kind: path of a namespace that it is to be in, ...},
     "host": the number of the host that it is started on (see process_ids.py),
     "asked_at": its control socket, which is brought here from another host (see twin.py)}
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import random
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from ddp_notebook.launch.process_groups import adopt_orphans


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when `parent_pid` dies. Elsewhere: no effect."""
    if not sys.platform.startswith("linux"):
        return
    # Linux takes the thread that forked for the parent, and not its process: a child whose parent
    # thread ends would be killed, though its parent lives. The fork server has one thread. No child
    # of this process inherits the setting: each has to ask for itself.
    # PR_SET_PDEATHSIG is 1.
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    # The signal comes when the parent dies after this call. If it died before, this process has
    # another parent already, and no signal will come.
    if os.getppid() != parent_pid:
        os._exit(1)


def become(spec: Mapping[str, Any], parent_pid: int) -> None:
    """Turn this process into the one `spec` describes: session, output, environment, folder.

    Raises OSError when it cannot be on its host.
    """
    if os.getsid(0) != os.getpid():
        # Ctrl-C in a terminal then reaches the notebook alone, and the processes that a rank starts
        # are found by their session.
        os.setsid()
    die_with_parent(parent_pid)
    adopt_orphans()
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    if errors := spec.get("errors"):
        os.close(log)
        log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    for path in spec.get("namespaces", {}).values():
        call("ddp_notebook.launch.lab_hosts:enter", {"path": path})
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])


def reseed() -> None:
    """Give a forked child random seeds of its own, as a new process would have."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


def disown_finalizers() -> None:
    """Before a fork: drop the exit functions of what is loaded.

    torch has one for each library of operators; they would copy 30 MB of shared pages. Functions
    registered from now on run at exit, as in a new process.
    """
    for each in list(getattr(weakref.finalize, "_registry", ())):
        each.atexit = False


def load(name: str) -> ModuleType:
    """Import a module by name: what runs in a child is of a higher layer."""
    return importlib.import_module(name)


def call(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function written ``package.module:function``."""
    module, _, function = name.partition(":")
    loaded = load(module)
    return getattr(loaded, function)(**arguments)


def start(spec: Mapping[str, Any], parent_pid: int) -> NoReturn:
    """In a fork: become what `spec` describes, or exit; never returns to the parent's code."""
    try:
        become(spec, parent_pid)
        reseed()
    except BaseException:  # noqa: BLE001  # no folder, no host: its log says why
        traceback.print_exc()
        os._exit(1)
    run(spec)


def run(spec: Mapping[str, Any]) -> NoReturn:
    """Make the calls of `spec`, then exit the process whatever they do."""
    code = 1
    try:
        for name, arguments in spec["calls"]:
            call(name, arguments)
        code = 0
    except SystemExit as stop:
        code = exit_code(stop)
    except BaseException:  # noqa: BLE001  # the process ends here; its log says why
        traceback.print_exc()
    finally:
        leave(code)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)


def leave(code: int) -> NoReturn:
    """End this process as a normal exit does, without unwinding into the fork server's own frames.

    Loaded modules are not torn down: their pages are shared, and each would be copied first.
    """
    try:
        # Private, but there is no other way to run them and then not return to the caller.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    finally:  # whatever the user's streams and exit functions raise
        os._exit(code)


def end_by_sigterm() -> None:
    """Make SIGTERM run the exit functions, then kill this process; its forks end at once."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        atexit._run_exitfuncs()
        os.kill(os.getpid(), number)

    def in_fork() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, {signal.SIGTERM})

    signal.signal(signal.SIGTERM, end)
    # Python drops signals that arrive for a child before its fork is complete.
    block, unblock = partial(mask, signal.SIG_BLOCK), partial(mask, signal.SIG_UNBLOCK)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_fork)


def watch_lifeline(fd: int) -> None:
    """End this process when the other end of `fd` closes, on platforms without a death signal."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="ddp-lifeline", daemon=True).start()


def main() -> NoReturn:
    """A child started as an ordinary process: its spec is the first line of standard input.

    Standard input stays open as the lifeline to the fork server.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1)
        if not chunk:
            os._exit(1)
        line += chunk
    spec = json.loads(line)
    lifeline = os.dup(0)
    become(spec, spec["parent_pid"])
    watch_lifeline(lifeline)
    run(spec)
