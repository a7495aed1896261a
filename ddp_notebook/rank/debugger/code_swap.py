"""Breakpoints compiled into functions that are loaded already: they get other code (Python 3.11).

A function's file is compiled once more, with calls of ours, and the function gets its part of it.
What it was compiled from must be what is in the file now.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import importlib.machinery
import inspect
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

from ddp_notebook.rank.debugger.instrument import (
    BEFORE_LOOP,
    ERROR,
    HOOK,
    CallOf,
    Lines,
    instrument,
)
from ddp_notebook.rank.inspect.frames import chain, code_in
from ddp_notebook.rank.variables.objects import functions

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

_REST_OF_COMPILED = "torch_dynamo_resume_in_"
_CALLED = ("__compiled_fn_", "__resume_at_")
"""How names begin that are called by what `torch.compile` makes of a function."""

OnCall = Callable[[FrameType, int], None]
"""Called by the code: with its frame, and the line of the breakpoint."""
Key = tuple[str, int]
"""What tells the functions of a file apart: qualified name and first line."""
Spot = tuple[int, str]
"""A line, and the plain condition of its breakpoints."""


@dataclass
class _Swapped:
    """A function that has our code in place of its own."""

    function: FunctionType
    own: CodeType
    ours: CodeType = field(repr=False)


class CodeSwap:
    """Puts our calls into functions, cells and modules, and takes them out again."""

    def __init__(self, on_call: OnCall, canonical: Callable[[str], str]) -> None:
        self._on_call = on_call
        self._canonical = canonical
        self._lines: Lines = {}
        self._places: dict[int, tuple[str, int, str]] = {}
        """By the number of a call: its file, line and plain condition."""
        self._numbers: dict[tuple[str, int, str], int] = {}
        self._count = itertools.count(1)
        self._swapped: dict[int, _Swapped] = {}
        """By the function's id."""
        self._ours: dict[CodeType, frozenset[Spot]] = {}
        """Code with our calls, also of cells and modules; where they are."""
        self._trees: dict[str, ast.Module] = {}
        """By file, what was compiled with our calls last, without them."""
        self._begun: dict[int, tuple[int, int]] = {}
        """By thread: the frame and the call before a loop that it passed last."""
        self._get_code: Any = None

    # -- which lines ---------------------------------------------------------------------

    def apply(self, lines: Lines) -> Mapping[str, str]:
        """Have calls in these lines and in no others; by file, why there can be none."""
        self._lines = lines
        self._hook_imports(bool(lines))
        if lines:
            setattr(builtins, HOOK, self._hook)
            setattr(builtins, ERROR, Exception)
        self._give_back()
        had = {self._canonical(code.co_filename) for code in self._ours}
        if not lines and not had:
            return {}
        problems = {
            file: self._swap(file, each) if file in lines else self._take_out(each)
            for file, each in self._functions_of({*lines, *had}).items()
        }
        if not lines:
            running = _running()
            self._ours = {code: at for code, at in self._ours.items() if code in running}
            self._trees.clear()
        return {file: why for file, why in problems.items() if why}

    def _give_back(self) -> None:
        """Functions have the code that they had before."""
        for swapped in self._swapped.values():
            if swapped.function.__code__ is swapped.ours:
                swapped.function.__code__ = swapped.own
        self._swapped.clear()

    def _functions_of(self, files: set[str]) -> dict[str, list[FunctionType]]:
        """By file, all functions that there are of it."""
        found: dict[str, list[FunctionType]] = {}
        ends = tuple(file.rpartition(os.sep)[2] for file in files)
        for function in _functions(lambda f: f.endswith(ends) and self._canonical(f) in files):
            file = self._canonical(function.__code__.co_filename)
            if file in files:
                found.setdefault(file, []).append(function)
        return found

    def is_ours(self, code: CodeType) -> bool:
        """Whether our calls are in this code, in each line that they belong in."""
        wanted = self._lines.get(self._canonical(code.co_filename), {})
        return wanted.items() <= self._ours.get(code, frozenset())

    def lacks_call(self, code: CodeType, line: int) -> bool:
        """Whether a breakpoint is in this line, and no call of ours for it."""
        wanted = self._lines.get(self._canonical(code.co_filename), {})
        return line in wanted and (line, wanted[line]) not in self._ours.get(code, ())

    def instrumented(self, tree: Any, file: str) -> Any:
        """`tree`, a module that is about to be compiled as `file`, with our calls."""
        canonical = self._canonical(file)
        if canonical in self._lines:
            self._trees[canonical] = copy.deepcopy(tree)
            instrument(tree, self._calls(canonical, self._lines[canonical]))
        return tree

    def compiled(self, code: CodeType) -> None:
        """This is what such a module was compiled to."""
        lines = self._lines.get(self._canonical(code.co_filename))
        if lines:
            for inner in code_in(code):
                self._ours[inner] = frozenset(lines.items())

    def _calls(self, file: str, lines: Mapping[int, str]) -> CallOf:
        def call_of(line: int) -> tuple[int, str] | None:
            if line not in lines:
                return None
            place = file, line, lines[line]
            number = self._numbers.get(place)
            if number is None:
                number = self._numbers[place] = next(self._count)
                self._places[number] = place
            return number, lines[line]

        return call_of

    def _hook(self, number: int, where: int = 0) -> None:
        file, line, condition = self._places[number]
        # Code that ran may keep a call of no use, or with the condition that was.
        if self._lines.get(file, {}).get(line) != condition:
            return
        frame = sys._getframe(1)
        thread = threading.get_ident() if where else 0
        if where == BEFORE_LOOP:
            self._begun[thread] = id(frame), number
        elif where and self._begun.pop(thread, None) == (id(frame), number):
            return  # the first round: the thread has just passed the call before the loop
        self._on_call(frame, line)

    # -- functions -----------------------------------------------------------------------

    def _swap(self, file: str, functions: list[FunctionType]) -> str:
        """Give functions of a file our code; why not, empty when each of them has it."""
        name = functions[0].__code__.co_filename
        text = source_of(name)
        if not text:
            return "it was made from text, as by exec, and there is no such file"
        try:
            plain, ours = ast.parse(text), ast.parse(text)
        except SyntaxError:
            return "its source cannot be read as Python"
        instrument(ours, self._calls(file, self._lines[file]))
        failed = set()
        by_flags: dict[int, tuple[dict[Key, CodeType], dict[Key, CodeType]]] = {}
        for function in functions:
            own = function.__code__
            if not any(line in self._lines[file] for line in lines_in(own)):
                continue
            flags = own.co_flags & _FUTURE
            if flags not in by_flags:
                by_flags[flags] = _compiled(plain, name, flags), _compiled(ours, name, flags)
            before, after = (codes.get(_key(own)) for codes in by_flags[flags])
            changed = before is not None and own not in self._ours and not _alike(before, own)
            if before is None or after is None or changed:
                failed.add(own.co_qualname)
            else:
                self._give(function, before, after)
        if failed:
            return (
                f"what {', '.join(sorted(failed))} runs is not what is in the file now: it was "
                "edited after it was imported. Load it anew: importlib.reload(module) in a %%ddp "
                "cell, or %ddp_restart"
            )
        return ""

    def _take_out(self, functions: list[FunctionType]) -> str:
        """Functions that were compiled with our calls run what they would without."""
        name = functions[0].__code__.co_filename
        file = self._canonical(name)
        tree = self._trees.get(file)
        if tree is None:
            return ""
        made: dict[tuple[int, frozenset[Spot]], tuple[dict[Key, CodeType], ...]] = {}
        for function in functions:
            ours = function.__code__
            if ours not in self._ours:
                continue
            how = ours.co_flags & _FUTURE, self._ours[ours]
            if how not in made:
                again = copy.deepcopy(tree)
                instrument(again, self._calls(file, dict(how[1])))
                made[how] = _compiled(tree, name, how[0]), _compiled(again, name, how[0])
            before, after = (codes.get(_key(ours)) for codes in made[how])
            if before is not None and after is not None and _alike(after, ours):
                function.__code__ = before
        return ""

    def _give(self, function: FunctionType, before: CodeType, after: CodeType) -> None:
        """`function` runs `after`, with our calls, in place of `before`."""
        function.__code__ = after
        self._swapped[id(function)] = _Swapped(function, before, after)
        for code in code_in(after):
            self._ours[code] = frozenset(self._lines[self._canonical(after.co_filename)].items())

    # -- modules that are imported later ---------------------------------------------------

    def _hook_imports(self, wanted: bool) -> None:
        loader = importlib.machinery.SourceFileLoader
        if wanted and self._get_code is None:
            self._get_code = plain = loader.get_code
            swap = self

            def get_code(self: Any, fullname: str) -> CodeType | None:
                code: CodeType | None = plain(self, fullname)  # `Armed` hears of it
                path = self.get_filename(fullname)
                if swap._canonical(path) not in swap._lines:
                    return code
                tree = swap.instrumented(ast.parse(self.get_data(path), path), path)
                made = compile(tree, path, "exec", dont_inherit=True)
                swap.compiled(made)
                return made

            loader.get_code = get_code  # type: ignore[method-assign]
        elif not wanted and self._get_code is not None:
            loader.get_code = self._get_code  # type: ignore[method-assign]
            self._get_code = None


def source_of(file: str) -> str:
    """The text of a file or a cell; the cell's first line, its magic, left empty."""
    return "".join(lines_of(file))


def lines_of(file: str) -> list[str]:
    """The same as lines, each with its end."""
    if not file.startswith("<"):
        linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines and not file.startswith("<"):  # in an archive: its module's loader has the text
        modules = (
            vars(module) for module in list(sys.modules.values()) if inspect.ismodule(module)
        )
        module = next((module for module in modules if module.get("__file__") == file), None)
        lines = linecache.getlines(file, module)
    if file.startswith("<") and lines and lines[0].lstrip().startswith("%%"):
        lines = ["\n", *lines[1:]]
    return lines


def _functions(in_frozen: Callable[[str], bool]) -> Iterator[FunctionType]:
    """All of them; a cell's own code, which IPython may make a function of, is none."""
    for function in functions(in_frozen):
        code = function.__code__
        # What the compiler makes of a function, or of the rest of it, is no function of the file.
        made = _REST_OF_COMPILED in code.co_name or any(
            n.startswith(_CALLED) for n in code.co_names
        )
        if code.co_name != "<module>" and not made:
            yield function


def _running() -> set[CodeType]:
    """The code of all frames of all threads."""
    innermost = sys._current_frames().values()
    return {frame.f_code for outer in innermost for frame in chain(outer)}


def lines_in(code: CodeType) -> Iterable[int]:
    """The lines of code, and of all functions and classes in it."""
    return (line for inner in code_in(code) for _, _, line in inner.co_lines() if line)


def _key(code: CodeType) -> Key:
    return code.co_qualname, code.co_firstlineno


def _compiled(tree: ast.Module, name: str, flags: int) -> dict[Key, CodeType]:
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if name.startswith("<") else 0
    module = compile(tree, name, "exec", flags=flags, dont_inherit=True)
    codes = {}
    for code in code_in(module):
        key = _key(code)
        # Two of the same name in one line (lambdas) cannot be told apart.
        codes[key] = None if key in codes else code
    return {key: code for key, code in codes.items() if code is not None}


def _alike(one: CodeType, other: CodeType) -> bool:
    return (
        one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_freevars == other.co_freevars
    )
