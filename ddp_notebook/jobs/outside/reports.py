"""What a rank does, by its Python stacks: as the report that it would give itself, and no more.

What a stack does not show stays unknown: which collectives were issued before, in which group.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis.collectives.describe import named
from ddp_notebook.evidence.frames import Frame, Sources, function_called
from ddp_notebook.jobs.outside.pyspy import Thread
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Collective,
    GroupMade,
    InitArguments,
    Part,
    Place,
    RankReport,
)
from ddp_notebook.rank.inspect.frames import GROUP_FUNCTIONS, STORE_FUNCTIONS, WAITING_IN

UNKNOWN_GROUP = "?"
"""The group of a collective that was given one: the stack does not tell which."""
_C10D = "torch/distributed/distributed_c10d.py"
_RENDEZVOUS = "torch/distributed/rendezvous.py"
_DDP = "torch/nn/parallel/distributed.py"
_ENGINE = "torch/autograd/graph.py"
_LOGGER = "torch/distributed/c10d_logger.py"
_GROUP = re.compile(r"ProcessGroup|\"group\": (?!None)")
_IS_CUT = re.compile(r"…|\.\.\.")
_MESH = "torch/distributed/device_mesh.py"
_NEW_GROUP, _DDP_INIT = "new_group", "DDP constructor"
_IN_SET_UP = ("store", "process-group", _NEW_GROUP)
_WITH_ARGUMENTS = (*STORE_FUNCTIONS, *GROUP_FUNCTIONS, "init_process_group")
_PEER = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}
_LIST = re.compile(r"\[\d{1,7}(, \d{1,7})*\]")


@dataclass(frozen=True, slots=True)
class Seen:
    """The report of a rank, and the collective in which it waits, where it waits in one."""

    report: RankReport
    record: Collective | None = None


def report_of(rank: int, threads: Sequence[Thread], sources: Sources, still: bool) -> Seen:
    """What is seen of a rank whose Python stacks these are.

    `still` is true where its whole process was seen to do nothing between two looks, and waits
    for no GPU: only then a rank in ``backward`` is said to wait for others.
    """
    main = next((thread for thread in threads if thread.main), None)
    if main is None or not main.frames:
        return Seen(RankReport(rank, doing="none of its Python code is on its main thread"))
    path = sources.path(main.frames)
    inside = _inside(main.frames)
    known = RankReport(rank, Activity.BUSY, doing=str(path[-1]) if path else "", path=path)
    if inside in _IN_SET_UP:
        return Seen(_in_set_up(known, main, inside))
    if not inside and not (still and _in_backward(main.frames)):
        return Seen(known)
    record = _record(rank, main, path, inside)
    known = replace(
        known,
        activity=Activity.WAITING,
        inside="ddp" if inside == _DDP_INIT else "collective",
        doing=named(record),
        entered=1,
        left=1,
        initialized=True,
    )
    return Seen(known, record)


def _torchs(main: Thread) -> Iterator[tuple[Frame, Mapping[str, str]]]:
    """The frames down to the innermost of the user's, and their variables; the innermost first."""
    for frame, variables in zip(main.frames, main.variables, strict=True):
        if frame.users:
            return
        yield frame, variables


def _inside(frames: Iterable[Frame]) -> str:
    """What the frames of torch's wait in: a part of set-up, or a collective; empty for neither."""
    own = list(itertools.takewhile(lambda frame: not frame.users, frames))
    rendezvous, c10d, ddp = (
        [frame.function for frame in own if frame.file.endswith(file)]
        for file in (_RENDEZVOUS, _C10D, _DDP)
    )
    if set(rendezvous) & set(STORE_FUNCTIONS):
        return "store"
    if _NEW_GROUP in c10d:  # it is made by the same function as the first group
        return _NEW_GROUP
    if set(c10d) & set(GROUP_FUNCTIONS):
        return "process-group"
    if "__init__" in ddp:
        return _DDP_INIT
    return next((name for name in c10d if name in WAITING_IN), "")


def _in_backward(frames: Sequence[Frame]) -> bool:
    """True of a thread whose innermost frame runs autograd's engine."""
    return frames[0].file.endswith(_ENGINE) and "backward" in frames[0].function


def _in_set_up(known: RankReport, main: Thread, inside: str) -> RankReport:
    """A rank that makes a group, with what its variables say that it was given."""
    waits = replace(known, activity=Activity.WAITING, inside="process-group", entered=1)
    if inside == _NEW_GROUP:
        return replace(waits, left=1, initialized=True, groups_made=tuple(_made(main, known)))
    given: dict[str, str] = {}
    for frame, variables in _torchs(main):
        if frame.function in _WITH_ARGUMENTS:
            given = {**variables, **given}  # the innermost has them as they are used
    backend = given.get("backend", "").strip("'\"")
    arguments = InitArguments(
        rank=_number(given.get("group_rank", given.get("rank"))),
        world_size=_number(given.get("group_size", given.get("world_size"))),
        master_addr=given.get("hostname", "").strip("'\""),
        master_port=_number(given.get("port")),
        backend="" if backend == "None" else backend,
    )
    return replace(waits, inside=inside, arguments=arguments)


def _made(main: Thread, known: RankReport) -> Iterator[GroupMade]:
    """The group that a rank makes, where the stack says which: torch's name of it is its number."""
    given: dict[str, str] = {}
    mesh = False
    for frame, variables in _torchs(main):
        mesh = mesh or frame.file.endswith(_MESH)
        if frame.file.endswith(_C10D):
            given = {**variables, **given}
    number = _number(given.get("group_name", "").strip("'\""))
    ranks = given.get("global_ranks_in_group", "")
    if number is not None and _LIST.fullmatch(ranks):
        members = tuple(int(word) for word in re.findall(r"\d+", ranks))
        yield GroupMade(number, members, path=known.path, of_mesh=mesh)


def _record(rank: int, main: Thread, path: tuple[Place, ...], inside: str) -> Collective:
    """The collective that the stack shows, as the first of its rank: how many it had is unknown."""
    api, part = function_called(main.frames)
    operation = inside
    if inside == _DDP_INIT:
        operation, part = "all_gather", Part.CONSTRUCTOR
    elif not inside:
        operation, part, api = "all_reduce", Part.BACKWARD, "backward"
    given = next((own for frame, own in _torchs(main) if frame.function == operation), {})
    in_default = part is not None or _has_no_group(main, operation)
    peer = next((_number(given[name]) for name in _PEER.get(operation, ()) if name in given), None)
    return Collective(
        rank,
        0,
        operation,
        group=DEFAULT_GROUP if in_default else UNKNOWN_GROUP,
        api=api or operation,
        part=part,
        peer=peer,
        path=path,
        waited=True,
    )


def _has_no_group(main: Thread, operation: str) -> bool:
    """True of a call that was given no group, by what torch's logger around it was handed.

    The function itself has the default group in its variable, and so looks like one with a group.
    """
    called = False
    for frame, variables in _torchs(main):
        if called and frame.file.endswith(_LOGGER):
            handed = f"{variables.get('args', '…')} {variables.get('kwargs', '…')}"
            return not _GROUP.search(handed) and not _IS_CUT.search(handed)
        called = frame.function == operation
    return False


def _number(text: str | None) -> int | None:
    """A number that py-spy wrote; None of anything else, as of torch's -1 for not given."""
    return int(text) if text is not None and text.isascii() and text[:9].isdigit() else None
