"""Where this rank is to stop, on which condition, and how often it passed."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from ddp_notebook import syntax
from ddp_notebook.rank.calls import Bound, Breakpoint
from ddp_notebook.rank.debugger.lines import Lines
from ddp_notebook.rank.debugger.source import (
    code_of,
    defined_at,
    first_line,
    line_with_code,
    named,
    parsed,
    plain,
    source_of,
    to_come,
)
from ddp_notebook.rank.inspect.frames import CELL_NAME, IsUsers, globals_for


@dataclass
class _Watched:
    """A breakpoint on this rank, with what counts its passes."""

    spec: Breakpoint
    bound: Bound
    condition: CodeType | None = None
    plain: str = ""
    """The condition, where it is a plain one."""
    message: CodeType | None = None
    text: str = ""
    """The number of the cell that it is in: another one with the same text has it too."""
    files: set[str] = field(default_factory=set)
    passes: int = 0
    done: bool = False
    note: str = ""
    """Who runs it and does not stop; or that its condition raises."""
    reported: bool = False
    """That its condition or message raises was said."""


class Breakpoints:
    """The breakpoints of this rank. `names` gives the user's global ones, `write` prints a line."""

    def __init__(
        self,
        is_users: IsUsers,
        names: Callable[[], Mapping[str, Any]],
        write: Callable[[str], None],
    ) -> None:
        self.never_runs: Callable[[str, int], str] = lambda file, line: ""
        """Why nothing can stop at a line of a file."""
        self.elsewhere: Callable[[str, int], str] = lambda file, line: ""
        """Who runs a line and does not stop there."""
        self._is_users = is_users
        self._names = names
        self._write = write
        self._watched: dict[int, _Watched] = {}
        self._at: dict[tuple[str, int], list[_Watched]] = {}
        self._paths: dict[str, str] = {}
        self._compiled: set[str] = set()
        """Scripts that ran."""

    @property
    def lines(self) -> Lines:
        """By file, the lines to stop at."""
        lines: dict[str, dict[int, str]] = {}
        for (file, line), watched in self._at.items():
            conditions = [each.plain and f"({each.plain})" for each in watched]
            lines.setdefault(file, {})[line] = " or ".join(conditions) if all(conditions) else ""
        return lines

    def replace(self, specs: Iterable[Breakpoint]) -> None:
        """Have these and no others; those that stay keep their counts."""
        before, self._watched = self._watched, {}
        for spec in specs:
            # One that is pending is looked for again: what it names may be there now.
            known = before.get(spec.number)
            stays = known is not None and known.spec == spec and (known.bound.line or spec.on)
            self._watched[spec.number] = known if known and stays else self._new(spec)
        self._index()

    def _new(self, spec: Breakpoint) -> _Watched:
        watched = _Watched(spec, self._bind(spec))
        file, line = watched.bound.file, watched.bound.line
        if line and (problem := self.never_runs(file, line)):
            watched.bound = Bound(spec.number, problem=problem)
        elif line:
            others = ", ".join(sorted(self._namesakes(spec.file) - {file}))
            namesakes = f"this is {file}. Not stopped at: {others}; name one with its folder"
            watched.note = self.elsewhere(file, line) or namesakes * bool(others)
            watched.files = {file}
        if spec.condition:
            watched.condition = compile(spec.condition, "<condition>", "eval")
            watched.plain = plain(spec.condition)
        if spec.log:
            watched.message = compile(f"f{spec.log!r}", "<log>", "eval")
        if CELL_NAME.fullmatch(spec.file):
            watched.text = (source_of(spec.file) or spec.text).strip()
        return watched

    def _index(self) -> None:
        # A new dict: threads that come to lines look into it meanwhile.
        at: dict[tuple[str, int], list[_Watched]] = {}
        for watched in self._watched.values():
            for file in watched.files if not watched.done else ():
                at.setdefault((file, watched.bound.line), []).append(watched)
        self._at = at

    # -- code that is about to run -------------------------------------------------------

    def adopt(self, tree: ast.AST, file: str) -> None:
        """A cell or a script that begins may be where breakpoints are.

        A cell with the text of another one, and one that redefines a function.
        """
        text = ""
        if CELL_NAME.fullmatch(file):
            text = source_of(file).strip()
        else:  # a session has any number of cells
            self._compiled.add(self.canonical(file))
        for watched in self._watched.values():
            line = defined_at(tree, watched.spec.function)
            if line:
                watched.bound = Bound(watched.spec.number, self.canonical(file), line)
                watched.files = {watched.bound.file}
            elif text and watched.text == text:
                watched.files.add(file)
        self._index()

    def loads(self, file: str) -> None:
        """A module is loaded or reloaded from `file`: its functions are where they are now."""
        # Breakpoints on lines stay at their number: the file may have been edited above them, but
        # which line is meant then only the user knows.
        file = self.canonical(file)
        of_file = [w for w in self._watched.values() if w.spec.function and w.bound.file == file]
        tree = parsed(source_of(file) if of_file else "")
        for watched in of_file:
            names = watched.spec.function.split(".")  # of which the first ones are the module's
            lines = (defined_at(tree, ".".join(names[at:])) for at in range(len(names)))
            line = next(filter(None, lines), watched.bound.line)
            watched.bound = replace(watched.bound, line=line)
        self._index()

    def bind_pending(self) -> None:
        """Look again for what was not loaded."""
        for watched in self._watched.values():
            if not (watched.bound.line or watched.bound.problem or watched.spec.on):
                watched.bound = self._bind(watched.spec)
                if watched.bound.line:
                    watched.files.add(watched.bound.file)
        self._index()

    def run_begins(self) -> None:
        """The first value that is not finite is that of each run."""
        for watched in self._watched.values():
            if watched.spec.on == "nan":
                watched.done = False

    def bounds(self, notes: Mapping[tuple[str, int], str]) -> tuple[Bound, ...]:
        """Where each is and how often it was passed; `notes`: who does not stop at a line."""
        imported = {self.canonical(file) for file in _module_files()} | self._compiled
        bounds = []
        for watched in self._watched.values():
            bound = watched.bound
            is_there = bound.file in imported or bool(watched.passes)
            if watched.spec.function or CELL_NAME.fullmatch(bound.file):
                is_there |= bound.loaded
            bounds.append(
                replace(
                    bound,
                    passes=watched.passes,
                    done=watched.done,
                    loaded=is_there,
                    note=notes.get((bound.file, bound.line), watched.note),
                )
            )
        return tuple(bounds)

    # -- a line is reached, or something happens -----------------------------------------

    def wants(self, on: str) -> bool:
        """Return True when one is set on such an event: an exception, a value, a collective."""
        return any(watched.spec.on == on and not watched.done for watched in self._watched.values())

    def occurred(self, on: str, frame: FrameType) -> tuple[str, ...]:
        """It has happened in `frame`; why the thread stops, nothing when it does not."""
        at = [w for w in self._watched.values() if w.spec.on == on and not w.done]
        return tuple(filter(None, [self._passed(watched, frame) for watched in at]))

    def hit(self, frame: FrameType) -> tuple[str, ...]:
        """The thread comes to the line of `frame`; why it stops, nothing when it does not."""
        at = self._at.get((self.canonical(frame.f_code.co_filename), frame.f_lineno), ())
        return tuple(filter(None, [self._passed(watched, frame) for watched in at]))

    def _passed(self, watched: _Watched, frame: FrameType) -> str:
        """Count a pass; why it stops, empty when it does not."""
        spec, condition, message = watched.spec, watched.condition, watched.message
        name = f"breakpoint {spec.number}"
        if condition is not None:
            try:
                if not eval(condition, globals_for(condition, frame), frame.f_locals):  # noqa: S307
                    return ""
            except Exception as error:  # noqa: BLE001  # the user's condition
                raised = _raised_first(watched, "its condition", error)
                if not raised:
                    return ""
                watched.note = f"{raised}, and stops no more where it does"
                return f"{name}: {raised}"
        watched.passes += 1
        if watched.passes < spec.count:
            return ""
        if message is not None:
            try:
                text = str(eval(message, globals_for(message, frame), frame.f_locals))  # noqa: S307
            except Exception as error:  # noqa: BLE001  # the user's message
                text = _raised_first(watched, f"--log of {name}", error)
                if not text:
                    return ""
            self._write(f"{text}\n")
            return ""
        if spec.once:
            watched.done = True
            self._index()
        return name

    # -- where they are ------------------------------------------------------------------

    def canonical(self, file: str) -> str:
        """One name for a file, however it was imported."""
        if file.startswith("<"):
            return file
        path = self._paths.get(file)
        if path is None:
            path = self._paths[file] = os.path.realpath(file)
        return path

    def _bind(self, spec: Breakpoint) -> Bound:
        """Find the line of code; 0 where it is not there yet, or never: then with the problem."""
        if spec.on:
            return Bound(spec.number)
        if not spec.file:
            return self._bind_function(spec)
        file = next(iter(self._files(spec.file)), "")
        text = source_of(file) or spec.text if file else ""
        if not text:
            return Bound(spec.number)
        try:
            line = line_with_code(syntax.parse(text), spec.line)
        except SyntaxError:
            return Bound(spec.number, file, problem="its source cannot be read as Python")
        if line is None:
            last = len(text.splitlines())
            problem = f"it has no code from line {spec.line} on; its last line is {last}"
            return Bound(spec.number, file, problem=problem)
        return Bound(spec.number, self.canonical(file), line)

    def _namesakes(self, wanted: str) -> set[str]:
        """Return the user's files of that name; none where it is a path, or no name is given."""
        if not wanted or os.path.isabs(wanted):  # noqa: PTH117
            return set()
        return set(map(self.canonical, filter(self._is_users, self._files(wanted))))

    def _files(self, wanted: str) -> list[str]:
        """Return all of that name: the imported ones, the user's first; else those on the path.

        The file itself where the name says which it is.
        """
        if CELL_NAME.fullmatch(wanted) or (os.path.isabs(wanted) and os.path.exists(wanted)):  # noqa: PTH110, PTH117
            return [wanted]
        end = os.sep + wanted.lstrip(os.sep)
        names = {file for file in _module_files() if file.endswith(end)}
        if not names and not os.path.isabs(wanted):  # noqa: PTH117
            folders = [folder for folder in sys.path if type(folder) is str]
            paths = (os.path.join(folder, wanted) for folder in folders)  # noqa: PTH118
            names = {path for path in paths if os.path.isfile(path)}  # noqa: PTH113
        return sorted(names, key=lambda name: (not self._is_users(name), len(name), name))

    def _bind_function(self, spec: Breakpoint) -> Bound:
        number, value = spec.number, named(spec.function, self._names(), self._is_users)
        code = code_of(value)
        if value is None:  # in a module that was not imported yet, maybe
            file, line = to_come(spec.function)
            if line:
                return Bound(number, self.canonical(file), line, loaded=False)
            problem = f"{file} defines no function or class of that name"
            return Bound(number, problem=problem if file and "." in spec.function else "")
        if code is not None:
            if not code.co_filename.startswith("<") or source_of(code.co_filename):
                return Bound(number, self.canonical(code.co_filename), first_line(code))
            why = "it was made from text, as a dataclass's __init__ is"
        elif inspect.isclass(value):
            why = "it is a class without Python code"
        else:
            why = f"it is {'C code' if callable(value) else 'not a function'}"
        stop = "Stop in the function that calls it"
        return Bound(number, problem=f"{why}: there is no line of Python to stop at. {stop}")


def _raised_first(watched: _Watched, what: str, error: Exception) -> str:
    """That the user's expression raised `error`; empty where that was said before."""
    if watched.reported:
        return ""
    watched.reported = True
    return f"{what} raised {type(error).__name__}: {error}"[:300]


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if type(file) is str:
            yield file
