"""An error of the user's code: its message, bounded, and the user's lines that led there."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ddp_notebook import model
from ddp_notebook.model import Place
from ddp_notebook.rank.inspect.frames import OURS, UserCode, file_shown, raised_by_handler

MOST_CHARACTERS = 30_000
"""The most lines of a traceback; its middle is left out."""
_LONGEST_TEXT = 2000
_LONGEST_INNER = 100_000
"""The most lines of a message that holds the traceback of a worker process."""
_MOST_WRAPPERS = 5
_MOST_FRAMES = 20
"""The most places in a report; of a traceback as many at its top and as many at its bottom."""
_LONGEST_SOURCE = 200
_INNER_TRACEBACK = "Traceback (most recent call last):"
_INNER_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def message_of(error: BaseException) -> str:
    """Its text; empty where `str` fails.

    torch raises what a worker process raised, with the worker's traceback as the message. Then
    the worker's own message comes first.
    """
    try:
        text = _without_controls(str(error)[:_LONGEST_INNER])
    except Exception:  # noqa: BLE001  # the user's own __str__
        return ""
    before, inner, trace = text.partition(_INNER_TRACEBACK)
    name = type(error).__name__
    lines = trace.strip().splitlines()
    if inner and lines:
        outer = " ".join(before.removesuffix("Original ").split()).strip("- :.")
        last = next((line for line in reversed(lines) if line.startswith(name)), lines[-1])
        own = _MODULE.sub("", last.strip().removeprefix(f"{name}: "))
        text = f"{own} ({outer})\n{text}" if outer else f"{own}\n{text}"
    return text[:_LONGEST_TEXT]


_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+: )")
"""The module before an error's name, which Python writes and torch keeps."""


def missing_path(error: BaseException) -> str:
    """The file or folder that was not there, if that is the error; empty for any other."""
    # torch.save writes in C++, whose error has the folder in its text alone.
    by_torch = _NO_FOLDER.search(message_of(error)) if type(error) is RuntimeError else None
    name = by_torch[1] if by_torch else None
    if isinstance(error, FileNotFoundError):
        name = error.filename
    return str(Path(os.fsdecode(name)).absolute()) if isinstance(name, (str, bytes, Path)) else ""


_NO_FOLDER = re.compile(r"Parent directory (.+) does not exist")


def is_interrupt(error: BaseException) -> bool:
    """True for what ends a cell that is interrupted: an `await` is cancelled instead."""
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "CancelledError"


def line_of(error: BaseException | None, file: str) -> int:
    """Return the last line of `file` itself that `error` passed through; 0 for none."""
    trace = error.__traceback__ if error is not None else None
    lines = [n for frame, n in traceback.walk_tb(trace) if frame.f_code.co_filename == file]
    return lines[-1] if lines else 0


def wrapped(error: BaseException, user_code: UserCode) -> Iterator[BaseException]:
    """`error`, and what the user's code raised that a library raised it from, the innermost last.

    A pipeline's stage raises "failed to run forward" from what the model's forward raised, and a
    DataLoader "exited unexpectedly" from what its handler of SIGCHLD says of a worker's end.
    """
    yield error
    for _ in range(_MOST_WRAPPERS):
        cause, passed = error.__cause__, [line[0] for line in _of_traceback(error)]
        if cause is not None and raised_by_handler(cause):
            yield cause
            return
        if cause is None or not passed or user_code.is_users(passed[-1]):
            return
        if not any(user_code.is_users(line[0]) for line in _of_traceback(cause)):
            return
        error = cause
        yield error


def frames_of(error: BaseException, user_code: UserCode) -> tuple[model.Frame, ...]:
    """The user's lines that `error`, and what it wraps, passed through, the outermost first.

    Those of a worker process, whose error torch raised here, come last; so does the line of a
    SyntaxError.
    """
    errors = list(wrapped(error, user_code))
    lines = [line for each in errors for line in _of_traceback(each)]
    innermost = errors[-1]
    lines += _of_worker(innermost)
    if isinstance(innermost, SyntaxError) and innermost.filename and innermost.lineno:
        lines.append((innermost.filename, innermost.lineno, ""))
    own = [line for line in lines if user_code.is_users(line[0])]
    frames = []
    for file, number, function in own[-_MOST_FRAMES:]:
        source = linecache.getline(file, number).strip()[:_LONGEST_SOURCE]
        name = "" if function == "<module>" else function
        frames.append(model.Frame(file_shown(file), number, name, source))
    return tuple(frames)


def in_thread(thread: str, error: BaseException, user_code: UserCode) -> model.ThreadError:
    """An error of a thread, for the report."""
    path = tuple(map(place_of, frames_of(error, user_code)))
    *_, own = wrapped(error, user_code)
    return model.ThreadError(thread[:60], type(own).__name__, message_of(own), path)


def place_of(frame: model.Frame) -> Place:
    """A frame by the name that its file is shown with."""
    return Place(frame.file.rpartition("/")[2], frame.line, frame.function, frame.source)


def without_ours(
    trace: TracebackType | None, user_code: UserCode
) -> tuple[TracebackType | None, str]:
    """A traceback without frames of ours; of an error that is ours, up to the user's last line.

    Of libraries only the line that raised is left, and a notice says how many are not shown. Of a
    very deep one the frames in the middle are left out.
    """
    chain = []
    while trace is not None:
        chain.append(trace)
        trace = trace.tb_next
    files = [each.tb_frame.f_code.co_filename for each in chain]
    users = [number for number, file in enumerate(files) if user_code.is_users(file)]
    if not users:
        return chain[0] if chain else None, ""
    end = users[-1] + 1 if files[-1].startswith(OURS) else len(chain)
    # The fault lab's scripts lie in this package, and count as the user's.
    known = [at for at in range(end) if at in users or not files[at].startswith(OURS)]
    told = {known[-1], *users}
    own = [chain[at] for at in known if at in told]
    hidden = len(known) - known.index(users[0]) - len(own)
    frames = model.counted(hidden, "frame")
    notice = f"[{frames} of libraries hidden; all frames: %ddp_where]\n" * bool(hidden)
    kept: TracebackType | None = None
    # Formatting the thousands of an endless recursion takes seconds, and they are alike.
    for each in reversed([*own[:_MOST_FRAMES], *own[_MOST_FRAMES:][-_MOST_FRAMES:]]):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept, notice


def shown(text: str) -> str:
    """A traceback with its colours, but nothing else that changes a terminal.

    Of a very long one the middle is left out.
    """
    left_out = len(text) - MOST_CHARACTERS
    if left_out > 0:
        half = MOST_CHARACTERS // 2
        notice = f"\n[... {left_out:,} characters not shown ...]\n"
        text = f"{text[:half]}\x1b[0m{notice}{text[-half:]}"
    return _without_controls(text, keep=_COLOUR)


def _without_controls(text: str, keep: str = r"(?!)") -> str:
    """`text` without escape codes and control characters, but for those that match `keep`."""
    return re.sub(f"({keep})|{_CONTROL}", r"\1", text)


_COLOUR = r"\x1b\[[0-9;]*m"
_CONTROL = (
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]"
)
_Line = tuple[str, int, str]
"""File, line and function."""


def _of_traceback(error: BaseException) -> list[_Line]:
    lines = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in lines]


def _of_worker(error: BaseException) -> Iterator[_Line]:
    text = error.args[0] if error.args else ""
    if isinstance(text, str) and _INNER_TRACEBACK in text:
        for file, line, function in _INNER_FRAME.findall(text):
            yield file, int(line), function
