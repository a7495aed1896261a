"""The process of a script's rank: a new one, as torchrun's would be, and observed.

It is `__main__`, with its own arguments and its folder first on the path, and knows no IPython.
When it is over it has done what ends a process, but its memory stays: it can still be asked for
its variables, until the session ends it. What its groups are connected by stays too: who still
needs this rank waits for it, and is seen where it waits, in place of an error that tells little.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.util
import io
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from ddp_notebook import syntax
from ddp_notebook.launch.child import exit_code
from ddp_notebook.launch.preload import hide_engine_modules
from ddp_notebook.model import CellStarted, OutputKind, Place, codec
from ddp_notebook.rank import boot, calls, gpu
from ddp_notebook.rank.calls import Script
from ddp_notebook.rank.cells import raised, values
from ddp_notebook.rank.cells.ending import Ending
from ddp_notebook.rank.cells.keyboard import Keyboard, LostInterrupts
from ddp_notebook.rank.cells.on_cpu import cuda_on_cpu
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.prepared.attached import Children
from ddp_notebook.rank.rank_process import RankProcess, questions_of, started_in, streams_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOOK_EVERY_S = 0.03
"""How often what it wrote is looked for."""


def main(
    rank: int, events: str, source: str, folder: str, output_folder: str, script: Mapping[str, Any]
) -> NoReturn:
    """Be `rank` of a script, until the session ends this process.

    `events` is where the session listens, and `source` says that this is a script's process.
    `folder` is the run's own; output that is too long to send goes to `output_folder`.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), boot.SWITCH_INTERVAL_S))
    own = Path(folder)
    boot.keep_temporary_files_in(own, own.parent)
    sender = EventSender(rank, events, source)
    out, err = streams_of(own, rank)
    logs = {out: OutputKind.STDOUT, err: OutputKind.STDERR}
    forwarder = OutputForwarder(sender, logs, Path(output_folder), _LOOK_EVERY_S)
    process = RankProcess(rank, sender, own, questions_of(own, rank))
    ScriptProcess(process, sender, forwarder, codec.decode(Script, script)).run()


class ScriptProcess:
    """Runs one script, and stays."""

    def __init__(
        self,
        process: RankProcess,
        events: EventSender,
        forwarder: OutputForwarder,
        script: Script,
    ) -> None:
        self._pid = os.getpid()
        self._folder = process.folder
        self._events = events
        self._forwarder = forwarder
        self._script = script
        self._core = core = RankCore(process, show=self._show)
        self._ending = Ending(core, events, forwarder)
        self._life = core.lifecycle(
            (
                forwarder,
                LostInterrupts(forwarder),
                Keyboard(core.user_code, core.debugger),
            )
        )
        self._children = Children(
            core, Path(script.path).name, script.world_size, started_in(process.folder)
        )
        self._asks_for_gpus = False
        self._left: tuple[Place, ...] = ()
        """The lines of the sys.exit() by which it ended well, the outermost first."""

    def run(self) -> NoReturn:
        """Run the script to its end, tell how it ended, and wait to be ended."""
        script, core = self._script, self._core
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's, for torch's `record`
            os.environ.setdefault(
                "TORCHELASTIC_ERROR_FILE", str(self._folder / f"error-{self._pid}.json")
            )
        torch.set_num_threads(script.threads)
        core.user_code.add_script(script.path)
        main = _as_main(script)
        core.handlers.on_question(calls.PULL, lambda of: values.get(of, vars(main)))
        self._life.attach()
        self._children.expect()
        is_over = False

        def pulse() -> dict[str, Any]:
            doing, cell = core.doing(in_run=not is_over), 0 if is_over else script.cell
            return {"doing": doing, "cell": cell, "withheld_bytes": self._forwarder.withheld_bytes}

        self._events.collect, self._events.pulse = self._forwarder.collect, pulse
        core.debugger.set_breakpoints(script.breakpoints)
        self._life.run_begins(Run(script.cell, script.paused, script.ledger))
        if script.as_gpus:
            cuda_on_cpu.begin(script.as_gpus)
        error = self._end_as_python_does(self._execute(main))
        if os.getpid() != self._pid:  # a child of os.fork() that has come to the script's end
            os._exit(exit_code(error))
        # Where there are no GPUs torch's examples say so and leave, or start as many ranks: none.
        left = (self._left and self._asks_for_gpus) or self._children.started_none
        started = core.init_calls.calls.entered or started_in(self._folder).exists()
        if left and error is None and not (started or script.as_gpus or torch.cuda.is_available()):
            note = (
                f"{Path(script.path).name} ended without init_process_group. There are no GPUs "
                f"here; if it needs some, run it on CPUs as it is: %ddp_run --cpu {script.name}\n"
            )
            self._forwarder.show(what=OutputKind.STDERR, text=note)
        if why := _OutputFile.why_lost:
            note = f"[... printed text was lost in {self._folder}: {why} ...]\n"
            self._forwarder.show(what=OutputKind.STDERR, text=note)
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _be_mute()
        core.sockets.end(groups=script.leaves)
        is_over = True
        self._ending.say(script.cell, error, script.path, self._life.run_ends, self._left)
        while True:
            # It returns whenever a handler of the script's has run.
            signal.pause()

    def _execute(self, main: types.ModuleType) -> BaseException | None:
        """Run its code; the error with which it ended."""
        script, core = self._script, self._core
        try:
            self._events.emit_now(CellStarted, cell=script.cell, number=script.number)
            data = Path(script.path).read_bytes()
            tree = syntax.parse(data, script.path)
            core.debugger.begins(tree, script.path)
            with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # Python says it
                # Its lines are shown as they run, whoever edits the file meanwhile.
                lines = importlib.util.decode_source(data).splitlines(keepends=True)
                linecache.cache[script.path] = len(data), None, lines, script.path
            code = compile(tree, script.path, "exec", dont_inherit=True)
            self._asks_for_gpus = _asks_for_gpus(code)
            exec(code, vars(main))  # noqa: S102
            gpu.await_work(core.main_thread.awaits_gpu)
        except SystemExit as stop:
            if stop.code is not None and not isinstance(stop.code, int):
                sys.stderr.write(f"{stop.code}\n")
            if exit_code(stop) % 256:  # the system keeps eight bits
                return stop
            self._left = tuple(map(raised.place_of, raised.frames_of(stop, core.user_code)))
        except BaseException as error:  # noqa: BLE001  # shown, and told to the session
            # A DataLoader's handler raises wherever its rank is when one more worker ends.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # The first frame is this one; the user's begins after it.
            error = error.with_traceback(getattr(error.__traceback__, "tb_next", None))
            hook = sys.excepthook
            torchs = str(getattr(hook, "__module__", "")).startswith("torch.")
            if raised.is_interrupt(error):
                pass  # the session tells of it itself
            elif hook is not sys.__excepthook__ and not torchs:
                hook(type(error), error, error.__traceback__)
            else:
                # Without a line of the script its code could not be compiled.
                began = raised.line_of(error, script.path)
                trace, notice = raised.without_ours(
                    error.__traceback__ if began else None, core.user_code
                )
                format_error = functools.partial(
                    traceback.format_exception, type(error), error, trace
                )
                lines = syntax.alone(format_error)
                lines.insert(-1, notice)
                self._show("".join(lines).rstrip())
            self._ending.stop_at(error)
            return error
        return None

    def _end_as_python_does(self, error: BaseException | None) -> BaseException | None:
        """Wait for its threads and call what it registered for its end; the error of all."""
        try:
            # As `multiprocessing` ends its processes: the pools of threads end with it, too.
            # Both are private. Python calls them only when it ends, and this process is to stay,
            # with the variables of its script.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except KeyboardInterrupt as interrupt:
            return error or interrupt
        except (OSError, ValueError, AttributeError):
            pass  # it has closed its streams, or put something else there
        return error

    def _show(self, text: str) -> bool:
        if os.getpid() != self._pid:
            sys.stderr.write(f"{text}\n")  # nothing is forwarded from a child
            return True
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self._forwarder.show(what=OutputKind.ERROR, text=raised.shown(text))
        return True


def _asks_for_gpus(code: types.CodeType) -> bool:
    """Return whether the script itself calls torch's functions that count GPUs or ask for one."""
    names = set(code.co_names)
    available = "is_available" in names and names & {"cuda", "accelerator"}
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return "device_count" in names or bool(available) or any(map(_asks_for_gpus, inner))


def _as_main(script: Script) -> types.ModuleType:
    """A fresh `__main__`, with the script's arguments, folder and streams."""
    main = types.ModuleType("__main__")
    names = vars(main)
    names.update(__builtins__=__builtins__, __annotations__={}, __cached__=None)
    folder, run_as = str(Path(script.path).parent), [script.name]
    if script.package is None:
        called = Path(script.name).absolute()
        # A folder is run by the __main__.py that is in it.
        main.__file__ = str(called / "__main__.py" if called.is_dir() else called)
        main.__loader__ = SourceFileLoader("__main__", script.path)
    else:
        name = f"{script.package}.{Path(script.path).stem}".removeprefix(".")
        spec = importlib.util.spec_from_file_location(name, script.path)
        main.__file__, main.__package__, main.__spec__ = script.path, script.package, spec
        main.__loader__ = spec.loader if spec is not None else None
        names["__cached__"] = spec and spec.cached
        folder, run_as = str(Path.cwd()), ["-m", name]
    sys.modules["__main__"] = main
    sys.argv[:] = [script.name, *script.arguments]
    sys.orig_argv[:] = [sys.executable, "-u", *run_as, *script.arguments]
    # A notebook imports from its own folder, too; torchrun's ranks do not.
    sys.path[:] = [folder, *filter(None, sys.path)]
    sys.stdout, sys.stderr = _Stream(1), _Stream(2)
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
    hide_engine_modules()
    return main


class _Stream(io.TextIOWrapper):
    """The script's streams. As torchrun runs `python -u`, nothing waits in a buffer: what was
    printed is seen at once, also of a process that is killed, and no child prints it again.
    """

    def __init__(self, fd: int) -> None:
        self._file = _OutputFile(fd, "wb", closefd=False)
        replaced = sys.__stdout__ if fd == 1 else sys.__stderr__
        errors = replaced.errors if replaced is not None else "backslashreplace"
        super().__init__(cast(Any, self._file), "utf-8", errors, write_through=True)
        self._file.name = "<stdout>" if fd == 1 else "<stderr>"
        vars(self)["mode"] = "w"

    def printed(self) -> int:
        """Grows with whatever the script prints, as that of a cell's stream does."""
        return self._file.written


class _OutputFile(io.FileIO):
    """The file behind a stream. Where it has no room, a print is lost and no error of the user's.

    A terminal has no such limit: under torchrun the script would go on.
    """

    why_lost = ""
    written = 0
    """Times that something was written."""

    def write(self, data: Any) -> int:
        self.written += 1
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            type(self).why_lost = error.strerror or str(error)
            return len(data)


def _be_mute() -> None:
    """Discard what torch's threads write from now on: the script is over.

    Not where the script left no file descriptor: its own error is reported, and no other.
    """
    try:
        null = os.open(os.devnull, os.O_RDWR)
    except OSError:
        return
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
