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
from types import CodeType, FrameType

from ddp_notebook.model import Part
from ddp_notebook.rank.inspect import frames

_MOST_FRAMES = 200
_MOST_PLACES = 20
"""User frames kept of one path: recursion is not told in full."""
_LOOK_FOR_LABELS = 3
"""How many user frames, from the innermost on, are looked at for a label."""
_TRIES = 3
"""How often a name is read before it counts as no text."""
_MOST_KNOWN = 20_000
_NEAR = 4
"""Frames from `site` out to the user's line, in most calls: its caller, the observer, torch's."""
_LABEL_CHARACTERS = 60
_WRAPPERS = "torch.distributed.c10d_logger"


@dataclass(eq=False, slots=True)
class Site:
    """Where a collective comes from. `number` names it on this rank."""

    number: int
    path: tuple[tuple[str, int, str, str], ...]
    """File, line, function and text of each user line, the outermost first."""
    api: str
    part: Part | None
    labels: tuple[_Label, ...] = ()
    """Names that may hold a label there; empty where `label` need not be asked."""


class _Kind:
    """What a code object is to us."""

    __slots__ = ("api", "autograd", "code", "ends", "labels", "part", "users")

    def __init__(self, code: CodeType, module: str) -> None:
        self.code = code  # keeps it alive: it is known by its id
        self.users = frames.is_users(code.co_filename)
        self.ends = self.users and code.co_name == "<module>"
        self.part = None if self.users else _part(module, code.co_name)
        self.api = "" if self.users else _api(module, code.co_name)
        self.autograd = module.startswith("torch.autograd")
        self.labels: list[_Label] = _labels(code) if self.users else []


class _Label:
    """A name that may hold the name of a metric, between two places of the bytecode."""

    __slots__ = ("begin", "end", "name", "tries")

    def __init__(self, name: str, begin: int, end: int) -> None:
        self.name, self.begin, self.end = name, begin, end
        self.tries = 0


def _labels(code: CodeType) -> list[_Label]:
    """Arguments, and what ``for`` loops go over, within the loop."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = [_Label(name, 0, len(code.co_code)) for name in arguments if name != "self"]
    stores, begin, end = 0, 0, 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            stores, begin, end = 1, instruction.offset, int(instruction.argval)
        elif stores and instruction.opname == "UNPACK_SEQUENCE":
            stores = instruction.arg or 0
        elif stores and instruction.opname.startswith("STORE_"):
            found += [_Label(name, begin, end) for name in _stored(instruction.argval)]
            stores -= 1
        elif instruction.opname not in _BETWEEN_STORES:
            stores = 0
    return found[:_MOST_LABELS]


def _stored(value: object) -> list[str]:
    """The names of a STORE_ instruction; some of Python 3.13 store two at once."""
    many = value if isinstance(value, tuple) else (value,)
    return [name for name in many if isinstance(name, str)]


_BETWEEN_STORES = ("CACHE", "EXTENDED_ARG", "NOP")
_MOST_LABELS = 12
_API_OF_DDP = {
    "__init__": ("DistributedDataParallel.__init__", Part.CONSTRUCTOR),
    "forward": ("forward", Part.FORWARD),
    "_pre_forward": ("forward", Part.FORWARD),
}


def _api(module: str, name: str) -> str:
    if module == "torch.nn.parallel.distributed" and name in _API_OF_DDP:
        return _API_OF_DDP[name][0]
    if module in ("torch._tensor", "torch.autograd") and name == "backward":
        return "backward"
    if module.startswith("torch.distributed") and name in frames.WAITING_IN:
        return name
    if module == "torch.distributed.algorithms.join":
        return "Join"
    return ""


def _part(module: str, name: str) -> Part | None:
    if module == "torch.nn.parallel.distributed" and name in _API_OF_DDP:
        return _API_OF_DDP[name][1]
    if module == "torch.autograd" and name == "backward":
        return Part.BACKWARD
    if module == "torch.distributed.algorithms.join":
        return Part.JOIN
    return None


class _UnderWay(threading.local):
    """The backward that this thread is in."""

    site: Site | None = None


_kinds: dict[int, _Kind] = {}
_sites: dict[tuple[int, ...], Site] = {}
_numbers = itertools.count(1)
_Way = tuple[tuple[CodeType, int], ...]
_last_way: dict[int, tuple[CodeType, bool, _Way, bool, Site]] = {}
"""By the place of the frame that is `_NEAR`: what called the observer when it was last called from
there, whether only torch's wrapper is in between, all frames from `_NEAR` on if it is and from the
observer's caller on if not, whether they end at the user's outermost, and the site."""
_under_way = _UnderWay()
_engine: CodeType | None = None
"""The code of torch that calls autograd's engine, once it was seen."""
_of_engine: Site | None = None
"""The backward that began last and is not over: the engine's own threads have no frames."""


def _kind(frame: FrameType) -> _Kind:
    code = frame.f_code
    kind = _kinds.get(id(code))
    if kind is None:
        kind = _kinds[id(code)] = _Kind(code, frame.f_globals.get("__name__", ""))
    return kind


def site(frame: FrameType | None) -> Site:
    """The site of the call that is in progress in `frame`, or further out.

    None in a thread of torch's that runs no Python.
    """
    if frame is None or frame.f_code is _engine:  # DDP's reducer, for each bucket
        known = _of_engine if frame is None else _under_way.site
        if known is not None:
            return known
    near: FrameType | None
    try:
        near = sys._getframe(_NEAR)
        at = id(near.f_code) + near.f_lasti
    except ValueError:
        near, at = None, 0
    # To compare with the way of last time is cheaper than to ask what each frame is, and each
    # frame that is not touched is one that Python need not make an object of.
    last = _last_way.get(at)
    if last is not None and frame is not None and frame.f_code is last[0]:
        _, wrapped, way, ends, found = last
        each = near if wrapped else frame
        for code, place_in in way:
            if each is None or each.f_code is not code or each.f_lasti != place_in:
                break
            each = each.f_back
        else:
            if ends or each is None:
                return found
    return _looked_up(frame, at, near)


def backward_begins(frame: FrameType | None) -> Site | None:
    """A backward is called from `frame`: it is the site of what is reduced until it is over.

    What was under way in this thread, to be given to `backward_ends`.
    """
    global _of_engine
    outer = _under_way.site
    _under_way.site = _of_engine = _looked_up(frame, part=Part.BACKWARD)
    return outer


def backward_ends(outer: Site | None) -> None:
    """The backward is over."""
    global _of_engine
    _under_way.site = _of_engine = outer


def _looked_up(
    frame: FrameType | None,
    at: int = 0,
    near: FrameType | None = None,
    part: Part | None = None,
) -> Site:
    global _engine
    _forget_if_many()
    key = [-1] if part is not None else []
    way: list[tuple[CodeType, int]] = []
    begin, ends = frame, False
    while frame is not None and len(way) < _MOST_FRAMES and not ends:
        kind = _kind(frame)
        way.append((frame.f_code, frame.f_lasti))
        if kind.users:
            key += (id(frame.f_code), frame.f_lasti)
            ends = kind.ends
        elif kind.api:
            key.append(id(frame.f_code))
        elif kind.autograd and frame is begin:
            _engine = frame.f_code
        frame = frame.f_back
    found = _sites.get(tuple(key)) or _new_site(tuple(key), begin, part)
    if begin is not None and near is not None:
        wrapped = _only_wrapped(begin, near)
        kept = tuple(way[2:] if wrapped else way)
        _last_way[at] = begin.f_code, wrapped, kept, ends, found
    return found


def _only_wrapped(frame: FrameType, near: FrameType) -> bool:
    """True when `near` called `frame`, a function of torch's, through the wrapper they all have.

    So the wrapper need not be looked at: there is no other way from the one to the other.
    """
    between = frame.f_back
    return (
        between is not None
        and between.f_back is near
        and bool(_kind(frame).api)
        and between.f_globals.get("__name__") == _WRAPPERS
    )


def _forget_if_many() -> None:
    """Where code is made anew all the time. All at once: sites are known by ids of kinds' code."""
    if len(_sites) > _MOST_KNOWN or len(_kinds) > _MOST_KNOWN:
        _sites.clear()
        _last_way.clear()
        _kinds.clear()


def _new_site(key: tuple[int, ...], frame: FrameType | None, part: Part | None) -> Site:
    begin = frame
    path: list[tuple[str, int, str, str]] = []
    api = "backward" if part is Part.BACKWARD else ""
    while frame is not None:
        kind = _kind(frame)
        if kind.users:
            path.append(place(frame))
            if kind.ends:
                break
        elif not path:
            api, part = kind.api or api, kind.part or part
        frame = frame.f_back
    labels = () if part is not None else tuple(_labels_at(begin))
    found = Site(next(_numbers), tuple(reversed(path[:_MOST_PLACES])), api, part, labels)
    _sites[key] = found
    return found


def place(frame: FrameType) -> tuple[str, int, str, str]:
    """File as it is shown, line, function and text of the line that `frame` is at."""
    code = frame.f_code
    match = frames.CELL_NAME.fullmatch(code.co_filename)
    file = f"cell {match[1]}" if match else code.co_filename.rpartition("/")[2]
    function = "" if code.co_name == "<module>" else code.co_name
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return (file, frame.f_lineno, function, text[:200])


def users_path(frame: FrameType | None) -> tuple[tuple[str, int, str, str], ...]:
    """The user's lines on the way to `frame`, the outermost first."""
    _forget_if_many()
    path: list[tuple[str, int, str, str]] = []
    while frame is not None and len(path) < _MOST_PLACES:
        kind = _kind(frame)
        if kind.users:
            path.append(place(frame))
            if kind.ends:
                break
        frame = frame.f_back
    return tuple(reversed(path))


def _labels_at(frame: FrameType | None) -> Iterator[_Label]:
    """The names that may hold a label where the innermost user frames stand."""
    for users in _innermost(frame):
        for each in _kind(users).labels:
            if each.begin <= users.f_lasti <= each.end:
                yield each


def _innermost(frame: FrameType | None) -> Iterator[FrameType]:
    seen = 0
    while frame is not None and seen < _LOOK_FOR_LABELS:
        kind = _kind(frame)
        if kind.users:
            seen += 1
            yield frame
            if kind.ends:
                return
        frame = frame.f_back


def label(frame: FrameType | None, site: Site) -> str:
    """Texts that the innermost user frames hold: the names of what is reduced, of a metric.

    A name that was not a text the first times is not read again.
    """
    if all(each.tries >= _TRIES for each in site.labels):
        site.labels = ()
        return ""
    found: list[str] = []
    for users in _innermost(frame):
        if _kind(users).labels:
            _read_labels(_kind(users), users, found)
    return " ".join(found)[:_LABEL_CHARACTERS]


def _read_labels(kind: _Kind, frame: FrameType, found: list[str]) -> None:
    at = frame.f_lasti
    inside = [each for each in kind.labels if each.begin <= at <= each.end]
    values = frame.f_locals if inside else {}
    for each in inside:
        value = values.get(each.name)
        if type(value) is str:
            found.append(value)
        elif value is not None:
            each.tries += 1
            if each.tries >= _TRIES:
                kind.labels.remove(each)
