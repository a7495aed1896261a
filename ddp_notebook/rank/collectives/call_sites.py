"""Where in the user's code a collective was issued, and through which function of torch.

Asked before each collective, so everything is looked up once per line and remembered.
"""

from __future__ import annotations

import dis
import itertools
import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FrameType

from ddp_notebook.model import PLACING, Part, Place
from ddp_notebook.rank.inspect import frames
from ddp_notebook.rank.inspect.frames import UserCode

_MOST_LINES = 20
"""User frames kept of one path: recursion is not told in full."""
_TRIES = 3
"""How often a variable is read before it counts as no text."""
_MOST_KNOWN = 20_000
_MOST_BETWEEN_RUNS = 100
"""Each cell is code of its own, which is kept alive by being known here."""
_NEAR = 5
"""Frames from `site` out to the user's line, in most calls: the observer's two, torch's function,
the wrapper that all of torch's have, and the user's."""
_getframe = sys._getframe
_WRAPPERS = "torch.distributed.c10d_logger"
_TORCHS = frozenset({"torch.distributed.distributed_c10d", _WRAPPERS})
_OPERATORS = "torch._ops", "torch._library"
_BETWEEN_STORES = ("CACHE", "EXTENDED_ARG", "NOP")
_OF_TORCH: dict[str, dict[str, tuple[str, Part | None]]] = {
    "torch.nn.parallel.distributed": {
        "__init__": ("DistributedDataParallel.__init__", Part.CONSTRUCTOR),
        "forward": ("forward", Part.FORWARD),
        "_pre_forward": ("forward", Part.FORWARD),
    },
    "torch._tensor": {"backward": ("backward", None)},
    "torch.autograd": {"backward": ("backward", Part.BACKWARD)},
}
"""By module and function: its name where a collective comes through it, and its part of DDP."""


class Caller(Enum):
    """Who calls a function of torch.distributed, or a functional collective (an operator)."""

    USER = 1
    LIBRARY = 2
    OPERATOR_OF_USER = 3
    OPERATOR_OF_LIBRARY = 4


@dataclass(eq=False, slots=True)
class CallSite:
    """Where a collective comes from. `number` names it on this rank."""

    number: int
    path: tuple[Place, ...]
    """Each user line on the way, the outermost first."""
    api: str
    part: Part | None
    variables: tuple[_Variable, ...] = ()
    """That may hold a metric's name there; empty where `metric_name` need not be asked."""
    thread: int = 0
    """The number of the thread of the user's that calls; 0 for the main thread."""
    caller: Caller = Caller.LIBRARY
    holders: tuple[tuple[int, _Code], ...] = ()
    """The frames that have such variables: how far out from the call, and what code they run."""

    @property
    def line(self) -> Place | None:
        """The user's innermost line; None where no line is theirs."""
        return self.path[-1] if self.path else None


class _Variable:
    """A name that may hold the name of a metric, between two offsets of the bytecode."""

    __slots__ = ("begin", "end", "name", "tries")

    def __init__(self, name: str, begin: int, end: int) -> None:
        self.name, self.begin, self.end = name, begin, end
        self.tries = 0


_FORKED = "multiprocessing.process", "_bootstrap"
"""The function in which a process of multiprocessing's begins."""


class _Code:
    """The kinds of code objects."""

    __slots__ = (
        *("api", "autograd", "code", "ends", "is_operator", "is_torchs", "part", "users"),
        "variables",
    )

    def __init__(self, code: CodeType, module: str, users: bool) -> None:
        self.code = code  # keeps it alive: it is known by its id
        self.users = users
        self.ends = users and code.co_name == "<module>"
        if (module, code.co_name) == _FORKED:
            self.ends = True  # below it are lines of the process that forked this one
        self.api, self.part = ("", None) if users else _api_and_part(module, code.co_name)
        self.autograd = module.startswith("torch.autograd")
        self.is_torchs = module in _TORCHS
        self.is_operator = module.startswith(_OPERATORS)
        self.variables: list[_Variable] = _variables(code) if users else []


def _variables(code: CodeType) -> list[_Variable]:
    """Arguments, and what ``for`` loops go over, within the loop."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    variables = [_Variable(name, 0, len(code.co_code)) for name in arguments if name != "self"]
    stores, begin, end = 0, 0, 0
    for instruction in dis.get_instructions(code):
        operation, about = instruction.opname, instruction.argval
        if operation == "FOR_ITER":
            stores, begin, end = 1, instruction.offset, int(about)
        elif not stores or operation in _BETWEEN_STORES:
            continue
        elif operation == "UNPACK_SEQUENCE":
            stores = int(about)
        elif operation.startswith("STORE_"):
            names = about if isinstance(about, tuple) else (about,)  # 3.13 stores two at once
            variables += [_Variable(name, begin, end) for name in names if isinstance(name, str)]
            stores -= 1
        else:
            stores = 0
    return variables[:12]


def _api_and_part(module: str, name: str) -> tuple[str, Part | None]:
    """Return a function's name where a collective comes through it, and its part of DDP.

    Both are empty for any other.
    """
    if module in _OF_TORCH:
        return _OF_TORCH[module].get(name, ("", None))
    if module == "torch.distributed.algorithms.join":
        return (name if name in frames.WAITING_IN else "Join"), Part.JOIN
    waits = module.startswith("torch.distributed") and name in frames.WAITING_IN
    places = module.startswith("torch.distributed.tensor") and name in PLACING
    return (name if waits or places else ""), None


def line_at(frame: FrameType) -> Place:
    """The line that `frame` is at."""
    code = frame.f_code
    match = frames.CELL_NAME.fullmatch(code.co_filename)
    file = f"cell {match[1]}" if match else code.co_filename.rpartition("/")[2]
    function = "" if code.co_name == "<module>" else code.co_name
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return Place(file, frame.f_lineno, function, text[:200])


class _Backward(threading.local):
    """The backward that this thread is in."""

    site: CallSite | None = None


_Frames = tuple[tuple[CodeType, int], ...]
_Way = tuple[CodeType, bool, _Frames, bool, "CallSite"]
"""The caller of the observer, whether only torch's wrapper is between it and the frame that is
`_NEAR`, all frames from `_NEAR` on if it is and from the observer's caller on if not, whether they
end at the user's outermost, and the call site."""


class CallSites:
    """All call sites of this rank, each looked up once."""

    def __init__(self, user_code: UserCode) -> None:
        self.is_users = user_code.is_users
        self._codes: dict[int, _Code] = {}
        self._sites: dict[tuple[int, ...], CallSite] = {}
        self._numbers = itertools.count(1)
        self._last: dict[int, tuple[_Way, ...]] = {}
        """By the position of the frame that is `_NEAR`: how the observer was called through there
        lately, the newest way first. Several: all messages of a pipeline pass one line. Backwards
        are there by the negative position of what calls them."""
        self._threads: dict[int, int] = {}
        self._backward = _Backward()
        self._engine: CodeType | None = None
        """The code of torch that calls autograd's engine, once it was seen."""
        self._engine_backward: CallSite | None = None
        """The backward that began last and is not over: the engine's threads have no frames."""

    def site(self, frame: FrameType | None) -> CallSite:
        """The call site of the call that is in progress in `frame`, or further out.

        `frame` may be None, in a thread of torch's that runs no Python.
        """
        if frame is None or frame.f_code is self._engine:  # DDP's reducer, for each bucket
            known = self._engine_backward if frame is None else self._backward.site
            if known is not None:
                return known
        near: FrameType | None
        try:
            # The sum is only where to look: that of another code and offset may be equal.
            # `_as_lately` compares the code and the offset of each frame before it gives a site.
            near = _getframe(_NEAR)
            at = id(near.f_code) + near.f_lasti
        except ValueError:
            near, at = None, 0
        return _as_lately(self._last.get(at, ()), frame, near) or self._look_up(frame, at, near)

    def backward_begins(self, frame: FrameType | None) -> CallSite | None:
        """A backward is called from `frame`: the call site of what is reduced until it is over.

        Gives the backward that this thread was in, for `backward_ends`.
        """
        backward = self._backward
        at = -(id(frame.f_code) + frame.f_lasti) if frame is not None else 0
        site = _as_lately(self._last.get(at, ()), frame, frame)
        if site is None:
            site = self._look_up(frame, at, frame, Part.BACKWARD)
        outer = backward.site
        backward.site = self._engine_backward = site
        return outer

    def backward_ends(self, outer: CallSite | None) -> None:
        """The backward is over."""
        self._backward.site = self._engine_backward = outer

    def metric_name(self, frame: FrameType | None, site: CallSite) -> str:
        """Texts that the innermost user frames hold: the names of what is reduced, of a metric.

        A variable that was not a text the first times is not read again.
        """
        for variable in site.variables:
            if variable.tries < _TRIES:
                break
        else:
            site.variables = ()
            return ""
        holding = _at_holders(frame, site.holders)
        if not holding:
            # Where they are is remembered: each collective of a loop asks.
            found = [each for each in self._innermost(frame) if each[1].variables]
            site.holders = tuple((hops, code) for hops, code, _ in found)
            holding = [(code, users) for _, code, users in found]
        texts: list[str] = []
        for code, users in holding:
            _read_variables(code, users, texts)
        return " ".join(dict.fromkeys(texts))[:60]

    def users_path(self, frame: FrameType | None) -> tuple[Place, ...]:
        """The user's lines on the way to `frame`, the outermost first."""
        self._forget_if_many()
        users = (line_at(at) for _, code, at in self._outwards(frame) if code.users)
        return tuple(reversed([*itertools.islice(users, _MOST_LINES)]))

    def users_line(self) -> Place | None:
        """The user's innermost line on this thread's stack; None where no line is theirs."""
        path = self.users_path(sys._getframe(1))
        return path[-1] if path else None

    # -- looking up ----------------------------------------------------------------------

    def _code(self, frame: FrameType) -> _Code:
        code = frame.f_code
        # By its id: to hash a code object is to hash all that is in it.
        known = self._codes.get(id(code))
        if known is None:
            module, users = frame.f_globals.get("__name__", ""), self.is_users(code.co_filename)
            known = self._codes[id(code)] = _Code(code, module, users)
        return known

    def _look_up(
        self,
        frame: FrameType | None,
        at: int = 0,
        near: FrameType | None = None,
        part: Part | None = None,
    ) -> CallSite:
        self._forget_if_many()
        caller = self._caller(frame)
        key = [-1 if part is not None else -2, -caller.value]
        seen: list[tuple[CodeType, int]] = []
        begin, ends = frame, False
        while frame is not None and len(seen) < 200 and not ends:
            code = self._code(frame)
            seen.append((frame.f_code, frame.f_lasti))
            if code.users:
                key += (id(frame.f_code), frame.f_lasti)
            elif code.api:
                key.append(id(frame.f_code))
            elif code.autograd and frame is begin:
                self._engine = frame.f_code
            ends = code.ends
            frame = frame.f_back
        # The number of this thread among those that call collectives; 0 for the main thread.
        thread, ident = 0, threading.get_ident()
        if begin is not None and not ends and ident != threading.main_thread().ident:
            # Threads that have a number of their own; the rest share the last number.
            thread = self._threads.setdefault(ident, min(len(self._threads) + 1, 127))
        if thread:
            key.append(-thread)
        site = self._sites.get(tuple(key)) or self._new_site(tuple(key), begin, part, thread)
        site.caller = caller
        # Frames alone do not tell threads apart.
        if begin is not None and near is not None and not thread:
            # True when `near` called torch's function through its wrapper alone. Then that need
            # not be looked at: there is no other way from the one to the other.
            between = begin.f_back
            wrapped = (
                between is not None
                and between.f_back is near
                and bool(self._code(begin).api)
                and between.f_globals.get("__name__") == _WRAPPERS
            )
            # The first two are torch's function and its wrapper. Behind a wrapper `_as_lately`
            # begins at `near`, so they are left out.
            known_frames = tuple(seen[2:] if wrapped else seen)
            way = begin.f_code, wrapped, known_frames, ends, site
            self._last[at] = way, *self._last.get(at, ())[:7]
        return site

    def _caller(self, frame: FrameType | None) -> Caller:
        """Who calls the function of torch's that `frame` is in."""
        if frame is None:
            return Caller.LIBRARY
        first = code = self._code(frame)
        while (code.is_operator if first.is_operator else code.is_torchs) and frame.f_back:
            frame = frame.f_back
            code = self._code(frame)
        if first.is_operator:
            return Caller.OPERATOR_OF_USER if code.users else Caller.OPERATOR_OF_LIBRARY
        return Caller.USER if code.users else Caller.LIBRARY

    def run_begins(self) -> None:
        """Forget the code of earlier cells from time to time."""
        self._forget_if_many(_MOST_BETWEEN_RUNS)

    def _forget_if_many(self, most: int = 0) -> None:
        """Forget all sites, which are known by ids of code: a program may create code forever."""
        most = most or _MOST_KNOWN
        if len(self._sites) > most or len(self._codes) > most:
            # All of them together: sites and ways are known by ids of code that `_codes` keeps
            # alive, and an id may be another code's as soon as its code is freed.
            self._sites.clear()
            self._last.clear()
            self._codes.clear()

    def _new_site(
        self, key: tuple[int, ...], frame: FrameType | None, part: Part | None, thread: int
    ) -> CallSite:
        path: list[Place] = []
        api = "backward" if part is Part.BACKWARD else ""
        for _, code, outer in self._outwards(frame):
            if code.users:
                path.append(line_at(outer))
            elif not path:
                api, part = code.api or api, code.part or part
        lines = tuple(reversed(path[:_MOST_LINES]))
        # What may name a metric where the innermost user frames stand; DDP's own have none.
        variables = tuple(
            variable
            for _, code, users in (self._innermost(frame) if part is None else ())
            for variable in code.variables
            if variable.begin <= users.f_lasti <= variable.end
        )
        number = next(self._numbers)
        site = self._sites[key] = CallSite(number, lines, api, part, variables, thread)
        return site

    def _outwards(self, frame: FrameType | None) -> Iterator[tuple[int, _Code, FrameType]]:
        """Yield each frame up to the user's outermost, its code, and how far out it is."""
        for hops, at in enumerate(frames.chain(frame)):
            code = self._code(at)
            yield hops, code, at
            if code.ends:
                return

    def _innermost(self, frame: FrameType | None) -> Iterator[tuple[int, _Code, FrameType]]:
        """Yield the user frames that are looked at for the name of a metric."""
        return itertools.islice((step for step in self._outwards(frame) if step[1].users), 3)


def _as_lately(
    ways: tuple[_Way, ...], frame: FrameType | None, near: FrameType | None
) -> CallSite | None:
    """The site of the one of these ways that led here again; None for another way.

    To compare with the frames of last time is cheaper than to ask what each frame is, and each
    frame that is not touched is one that Python need not make an object of.
    """
    for caller, wrapped, known_frames, ends, site in ways:
        if frame is None or frame.f_code is not caller:
            continue
        outer = near if wrapped else frame
        for code, offset in known_frames:
            if outer is None or outer.f_code is not code or outer.f_lasti != offset:
                break
            outer = outer.f_back
        else:
            if ends or outer is None:
                return site
    return None


def _at_holders(
    frame: FrameType | None, holders: tuple[tuple[int, _Code], ...]
) -> list[tuple[_Code, FrameType]]:
    """The frames at these distances; none if other code than before runs in one of them."""
    found = []
    at = 0
    for hops, code in holders:
        while at < hops and frame is not None:
            frame, at = frame.f_back, at + 1
        if frame is None or frame.f_code is not code.code:
            return []
        found.append((code, frame))
    return found


def _read_variables(code: _Code, frame: FrameType, texts: list[str]) -> None:
    at = frame.f_lasti
    inside = [variable for variable in code.variables if variable.begin <= at <= variable.end]
    # Before Python 3.13 this copies all variables of a function into a dict: so only where one of
    # them is wanted.
    values = frame.f_locals if inside else {}
    for variable in inside:
        value = values.get(variable.name)
        if type(value) is str:
            if value[:1] != "/":  # a path, which may be each rank's own, names no metric
                texts.append(value)
        elif value is not None:
            variable.tries += 1
            if variable.tries >= _TRIES:
                code.variables.remove(variable)
