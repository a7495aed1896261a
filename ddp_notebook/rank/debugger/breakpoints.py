"""Where this rank is to stop, on which condition, and how often it passed."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank.calls import Bound, Breakpoint
from ddp_notebook.rank.debugger.lines import Lines
from ddp_notebook.rank.debugger.named import code_of, defined_at, first_line, named, parsed, to_come
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
    """Of the cell that it is in: another one with the same text has it too."""
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
            known = before.get(spec.number)
            if known is not None and known.spec == spec and (known.bound.line or spec.on):
                self._watched[spec.number] = known
            else:
                self._watched[spec.number] = self._new(spec)
        self._index()

    def _new(self, spec: Breakpoint) -> _Watched:
        watched = _Watched(spec, self._checked(self._bind(spec)))
        if watched.bound.line:
            watched.note = self.elsewhere(watched.bound.file, watched.bound.line)
            watched.note = watched.note or self._others_note(spec, watched.bound.file)
        if spec.condition:
            watched.condition = compile(spec.condition, "<condition>", "eval")
            watched.plain = plain(spec.condition)
        if spec.log:
            watched.message = compile(message_source(spec.log), "<log>", "eval")
        if CELL_NAME.fullmatch(spec.file):
            watched.text = _normal(source_of(spec.file) or spec.text)
        watched.files = {watched.bound.file} if watched.bound.line else set()
        return watched

    def _checked(self, bound: Bound) -> Bound:
        problem = self.never_runs(bound.file, bound.line) if bound.line else ""
        return Bound(bound.number, problem=problem) if problem else bound

    def _index(self) -> None:
        self._at = {}
        for watched in self._watched.values():
            for file in watched.files if not watched.done else ():
                self._at.setdefault((file, watched.bound.line), []).append(watched)

    def adopt(self, tree: ast.AST, file: str) -> bool:
        """A cell or a script that begins may be where breakpoints are; True when some are new.

        A cell with the text of another one, and one that defines a function anew.
        """
        new = False
        if not CELL_NAME.fullmatch(file):  # a session has any number of cells
            self._compiled.add(self.canonical(file))
        text = _normal(source_of(file)) if CELL_NAME.fullmatch(file) else ""
        for watched in self._watched.values():
            same = bool(text) and watched.text == text
            line = defined_at(tree, watched.spec.function)
            if line:
                bound = Bound(watched.spec.number, self.canonical(file), line)
                new |= watched.bound != bound
                watched.bound, watched.files = bound, {bound.file}
            elif same and file not in watched.files:
                watched.files.add(file)
                new = True
        if new:
            self._index()
        return new

    def loads(self, file: str) -> bool:
        """A module is loaded from `file`, maybe anew: its functions are where they are now.

        True when some breakpoints have moved with theirs.
        """
        file = self.canonical(file)
        named_there = [
            watched
            for watched in self._watched.values()
            if watched.spec.function and watched.bound.file == file
        ]
        tree = parsed(source_of(file) if named_there else "")
        moved = False
        for watched in named_there:
            names = watched.spec.function.split(".")
            lines = (defined_at(tree, ".".join(names[at:])) for at in range(len(names)))
            line = next(filter(None, lines), watched.bound.line)
            moved |= line != watched.bound.line
            watched.bound = replace(watched.bound, line=line)
        if moved:
            self._index()
        return moved

    def bind_pending(self) -> bool:
        """Look again for what was not loaded; True when some of it is now."""
        found = False
        for watched in self._watched.values():
            if not (watched.bound.line or watched.bound.problem or watched.spec.on):
                watched.bound = self._bind(watched.spec)
                if watched.bound.line:
                    watched.files.add(watched.bound.file)
                    found = True
        if found:
            self._index()
        return found

    def run_begins(self) -> None:
        """The first value that is not finite is that of each run."""
        for watched in self._watched.values():
            if watched.spec.on == "nan":
                watched.done = False

    def wants(self, on: str) -> bool:
        """Whether one of them is set on what may happen: an exception, a value, a collective."""
        return any(watched.spec.on == on and not watched.done for watched in self._watched.values())

    def occurred(self, on: str, frame: FrameType) -> tuple[str, ...]:
        """It has happened in `frame`; why the thread stops, nothing when it does not."""
        at = [
            watched
            for watched in self._watched.values()
            if watched.spec.on == on and not watched.done
        ]
        reasons = [self._passed(watched, frame) for watched in at]
        return tuple(reason for reason in reasons if reason)

    def bounds(self, notes: Mapping[tuple[str, int], str]) -> tuple[Bound, ...]:
        """Where each is and how often it was passed; `notes`: who does not stop at a line."""
        files = {self.canonical(file) for file in _module_files()} | self._compiled
        bounds = (self._bound_now(watched, files) for watched in self._watched.values())
        return tuple(
            replace(bound, note=notes.get((bound.file, bound.line), bound.note)) for bound in bounds
        )

    def _bound_now(self, watched: _Watched, files: set[str]) -> Bound:
        bound = watched.bound
        loaded = bound.loaded and bool(watched.spec.function or CELL_NAME.fullmatch(bound.file))
        loaded = loaded or bound.file in files or bool(watched.passes)
        return replace(
            bound, passes=watched.passes, done=watched.done, loaded=loaded, note=watched.note
        )

    # -- a line is reached ---------------------------------------------------------------

    def hit(self, frame: FrameType, line: int) -> tuple[str, ...]:
        """The thread reaches a line; why it stops, nothing when it does not."""
        at = self._at.get((self.canonical(frame.f_code.co_filename), line), ())
        reasons = [self._passed(watched, frame) for watched in tuple(at)]
        return tuple(reason for reason in reasons if reason)

    def _passed(self, watched: _Watched, frame: FrameType) -> str:
        spec = watched.spec
        name = f"breakpoint {spec.number}"
        if watched.condition is not None:
            try:
                names = globals_for(watched.condition, frame)
                if not eval(watched.condition, names, frame.f_locals):  # noqa: S307
                    return ""
            except Exception as error:  # noqa: BLE001  # the user's condition, not the user's code
                if watched.reported:
                    return ""
                watched.reported = True
                raised = f"its condition raised {type(error).__name__}: {error}"[:300]
                watched.note = f"{raised}, and stops no more where it does"
                return f"{name}: {raised}"
        watched.passes += 1
        if watched.passes < spec.count:
            return ""
        if watched.message is not None:
            self._log(watched, frame)
            return ""
        if spec.once:
            watched.done = True
            self._index()
        return name

    def _log(self, watched: _Watched, frame: FrameType) -> None:
        assert watched.message is not None
        try:
            names = globals_for(watched.message, frame)
            text = eval(watched.message, names, frame.f_locals)  # noqa: S307
        except Exception as error:  # noqa: BLE001  # the user's message
            if watched.reported:
                return
            watched.reported = True
            text = f"--log of breakpoint {watched.spec.number} raised {type(error).__name__}"
            text += f": {error}"
        self._write(f"{text}\n")

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
        if spec.on:
            return Bound(spec.number)
        if not spec.file:
            return self._bind_function(spec)
        file = spec.file
        if not CELL_NAME.fullmatch(file):
            file = self._file(spec.file)
            if not file:
                return Bound(spec.number)
        text = source_of(file) or spec.text
        try:
            line = line_with_code(ast.parse(text), spec.line)
        except SyntaxError:
            return Bound(spec.number, file, problem="its source cannot be read as Python")
        if line is None:
            last = len(text.splitlines())
            if not last:
                return Bound(spec.number)
            problem = f"it has no code from line {spec.line} on; its last line is {last}"
            return Bound(spec.number, file, problem=problem)
        return Bound(spec.number, self.canonical(file), line)

    def _file(self, wanted: str) -> str:
        """The file of that name: it is there, or a module has been imported from one like it."""
        if os.path.isabs(wanted) and os.path.exists(wanted):  # noqa: PTH110, PTH117
            return wanted
        return next(iter(self._files(wanted)), "")

    def _files(self, wanted: str) -> list[str]:
        """All of that name: the imported ones, the user's first; else those on the path."""
        end = os.sep + wanted.lstrip(os.sep)
        names = {file for file in _module_files() if file.endswith(end)}
        if not names and not os.path.isabs(wanted):  # noqa: PTH117
            folders = [folder for folder in sys.path if type(folder) is str]
            paths = (os.path.join(folder, wanted) for folder in folders)  # noqa: PTH118
            names = {path for path in paths if os.path.isfile(path)}  # noqa: PTH113
        return sorted(names, key=lambda name: (not self._is_users(name), len(name), name))

    def _others_note(self, spec: Breakpoint, file: str) -> str:
        """That other files of the user's have the name; empty where its name says which."""
        if not spec.file or CELL_NAME.fullmatch(spec.file) or os.path.isabs(spec.file):  # noqa: PTH117
            return ""
        named_so = map(self.canonical, filter(self._is_users, self._files(spec.file)))
        others = sorted({each for each in named_so if each != file})
        if not others:
            return ""
        return f"this is {file}. Not stopped at: {', '.join(others)}; name one with its folder"

    def _bind_function(self, spec: Breakpoint) -> Bound:
        value = named(spec.function, self._names(), self._is_users)
        code = code_of(value)
        if code is not None and _has_source(code):
            return Bound(spec.number, self.canonical(code.co_filename), first_line(code))
        if code is not None:
            why = "it was made from text, as a dataclass's __init__ is"
        elif value is None:
            return self._bind_to_come(spec)
        elif inspect.isclass(value):
            why = "it is a class without Python code"
        else:
            why = f"it is {'C code' if callable(value) else 'not a function'}"
        stop = "Stop in the function that calls it"
        problem = f"{why}: there is no line of Python to stop at. {stop}"
        return Bound(spec.number, problem=problem)

    def _bind_to_come(self, spec: Breakpoint) -> Bound:
        """To a function of a module that was not imported yet."""
        file, line = to_come(spec.function, source_of)
        if line:
            return Bound(spec.number, self.canonical(file), line, loaded=False)
        if file and "." in spec.function:
            problem = f"{file} defines no function or class of that name"
            return Bound(spec.number, problem=problem)
        return Bound(spec.number)


def _normal(text: str) -> str:
    return text.strip()


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if type(file) is str:
            yield file


def _has_source(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith("<") or bool(source_of(name))


def message_source(text: str) -> str:
    """``step {i}`` as the source of an f-string. Raises SyntaxError where it is none."""
    source = f"f{text!r}"
    compile(source, "<log>", "eval")
    return source


# -- source ------------------------------------------------------------------------------


def source_of(file: str) -> str:
    """Return the text of a file or a cell; the cell's first line, its magic, left empty."""
    return "".join(lines_of(file))


def lines_of(file: str) -> list[str]:
    """Return the same as lines, each with its end."""
    if file.startswith("<"):
        lines = linecache.getlines(file)
        return ["\n", *lines[1:]] if lines and lines[0].lstrip().startswith("%%") else lines
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines:  # in an archive: its module's loader has the text
        modules = (each for each in list(sys.modules.values()) if inspect.ismodule(each))
        module = next((each for each in modules if vars(each).get("__file__") == file), None)
        lines = linecache.getlines(file, vars(module) if module else None)
    return lines


def line_with_code(tree: ast.AST, wanted: int) -> int | None:
    """Return the line to stop at for a `wanted` one: of its statement, or of the next one."""
    spans = []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Global | ast.Nonlocal):
            spans.append(_span(node))
        elif isinstance(node, ast.Lambda):
            spans.append(_span(node.body))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.append(_span(node.body[0]))
    spans = [span for span in spans if span not in docstrings]
    around = [first for first, last in spans if first <= wanted <= last]
    return max(around, default=min((first for first, _ in spans if first > wanted), default=None))


def _span(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return the first and last line of a node that are its own: of a function, its head."""
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(each.lineno for each in decorators)])
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return first, max(node.lineno, body[0].lineno - 1)
    return first, node.end_lineno or first


_PLAIN = (
    *(ast.Expression, ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Compare),
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def plain(condition: str) -> str:
    """Return the condition in one line; empty where it calls something, or makes variables."""
    tree = ast.parse(condition.strip(), mode="eval")
    is_plain = "__" not in condition and all(isinstance(node, _PLAIN) for node in ast.walk(tree))
    return ast.unparse(tree) if is_plain else ""
