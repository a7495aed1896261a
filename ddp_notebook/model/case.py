"""The input of a diagnosis: a report of each rank, their collectives, and the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ddp_notebook.model.codec import OMIT_DEFAULT
from ddp_notebook.model.collectives import Collectives, Place, Splits
from ddp_notebook.model.ddp import Fingerprint
from ddp_notebook.model.diagnosis import Remark
from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.stages import InitArguments
from ddp_notebook.model.training import ReplicaCounts


class Activity(StrEnum):
    """The activity of a rank's main thread, from the other ranks' point of view."""

    BUSY = "busy"
    """It runs its own code, and may still call what the others wait in."""
    WAITING = "waiting"
    """It is inside torch and waits for others."""
    HELD = "held"
    """It is paused before a stage or a collective until `%ddp_step`."""
    IDLE = "idle"
    """It is idle: it has finished, or was given nothing to run."""
    FAILED = "failed"
    """Its cell or script raised an error; it is idle now."""
    DEAD = "dead"
    """Its process is gone."""
    SILENT = "silent"
    """Its process is there and does not answer."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An attempt of the rank to reach the store, or another rank.

    `state`: open, refused, timeout, unresolved, resolving; other, if something else than a store of
    torch's has answered.
    """

    target: str = ""
    state: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoreFile:
    """The file of a ``file://`` rendezvous, as the rank sees it."""

    path: str = ""
    exists: bool = False
    claims: Mapping[str, int] = field(default_factory=dict)
    """How often each rank's address was written into it, by rank."""
    lost: bool = False
    """The rank's own entries are missing from it, or the file does not exist.

    Of a rank that has a default group, or that has waited for the others for seconds.
    """
    missing_folder: str = ""
    """The folder that it is to be in, if that does not exist."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A DataLoader's process that must deliver a batch for which its rank's main thread waits.

    `due` is true of the one whose batch comes next. `forked` is true of one that was forked from
    the rank, locks and all.
    """

    pid: int
    due: bool = False
    forked: bool = False
    still_s: float = 0.0
    """For how many seconds no thread of it has been seen to run."""
    locked: bool = False
    """All its threads wait, without a time limit, for locks that only they could release."""
    stopped: bool = False
    """It is stopped, as by Ctrl-Z or a debugger."""
    place: Place | None = None
    """Where it is in the user's code; known only if it is deadlocked and forked."""


@dataclass(frozen=True, slots=True)
class ThreadError:
    """An error that ended a thread other than the main one; `path` are the user's lines."""

    thread: str
    type: str
    text: str = ""
    path: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupMade:
    """A call of `new_group` on one rank, its own or that of a mesh which it made.

    `number` counts them as torch does, since the default group was made: it is calls of equal
    number that meet. `members` are the ranks that it gave, as ranks of the default group;
    `called` is the dimension of the mesh, or what the user called the group.
    """

    number: int
    members: Ranks
    called: str = ""
    path: tuple[Place, ...] = ()
    of_mesh: bool = False


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """A unit that FSDP2 gathers on a rank: the parameters of a module passed to `fully_shard`.

    `model` numbers the models of the rank, in the order in which they were used; `name` is that
    of the module in it. `mesh` are ranks of the default group.
    """

    model: int
    name: str
    parameters: int
    reshards: bool
    """It is freed after forward, and gathered again in backward."""
    mesh: Ranks
    trained: int | None = None
    """How many of its parameters require a gradient; None where not known."""


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """A rank's part in a pipeline of torch's: the stages that it runs, and how.

    `meant` are the stages that torch expects on it; `members` are ranks of the default group.
    `forward` and `backward` are the micro-batches that it is at, None for none, or not known.
    """

    schedule: str
    """GPipe, 1F1B, Interleaved1F1B, …"""
    stages: tuple[int, ...]
    num_stages: int
    micro_batches: int
    meant: tuple[int, ...]
    members: Ranks
    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True, slots=True)
class RankError:
    """The error that ended a rank's cell or script; without a type there was no error."""

    type: str = ""
    text: str = ""
    at: tuple[Place, ...] = ()
    """The user's lines that the error passed through, the outermost first."""
    category: str = ""
    """A category the rank itself is sure of."""
    remedy: str = ""
    holder: str = ""
    """If a port was in use: by which process."""
    path: str = field(default="", metadata=OMIT_DEFAULT)
    """The file or folder that was not there, if that is the error."""
    path_exists: bool = field(default=False, metadata=OMIT_DEFAULT)
    """It is there by now."""
    variables: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """The variables of the user's function that raised it, with their values then, shortened."""


@dataclass(frozen=True, slots=True)
class PathChange:
    """A change of a rank's to a file or folder: it was ``written``, ``made`` or ``removed``."""

    what: str
    path: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A rank's process and main thread, as the system sees them on its host."""

    pid: int = 0
    """0 if unknown."""
    state: str = ""
    """The process state of a rank that does not answer: sleeping, stopped, …"""
    runnable: bool = False
    """Its main thread, or one of torch's, is runnable and may only lack a CPU."""
    main_cpu_s: float = 0.0
    """CPU time of its main thread so far."""
    still_s: float = 0.0
    """For how many seconds it was seen at one place, where it used no CPU time."""
    cannot_answer: str = field(default="", metadata=OMIT_DEFAULT)
    """The error that its report failed with."""
    unreachable: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Its socket was removed, so it cannot be asked."""
    program: str = field(default="", metadata=OMIT_DEFAULT)
    """Another program that its process runs now, by os.exec: ``sleep 60``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and of Python, by name."""
    changed: tuple[PathChange, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Its last changes of the file system, by Python's own functions and torch.save."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a rank's process ended."""

    code: int | None = None
    last_words: str = ""
    peak_bytes: int = 0
    """Its peak memory; 0 if unknown."""
    oom_kills: int = -1
    """Processes that the kernel killed meanwhile for lack of memory; -1 if unknown."""
    left_at: tuple[Place, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """The lines of the sys.exit() by which its script has ended well, the outermost first."""


@dataclass(frozen=True, slots=True)
class Network:
    """Where a rank is, and what it reaches from there."""

    host: str = ""
    """The name of the host that it runs on."""
    loopback: str = ""
    """That host's network: the same for ranks that share a loopback. Empty where unknown."""
    listens: tuple[str, ...] = ()
    """Its address for the other ranks while the group is created, as ``address:port``."""
    reach: tuple[Probe, ...] = ()
    """Its attempts to reach the others there."""
    probe: Probe = Probe()
    """Its attempt to reach the store."""
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The addresses to which names resolve on its host; empty for a name that does not."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The things that a rank's main thread waits for, besides calls of other ranks."""

    file: str = ""
    """A file that its own code waits for in a loop, and that does not exist."""
    workers: tuple[Worker, ...] = ()
    """The workers of the DataLoader that owes it a batch."""
    processes: bool = False
    """It waits for the end of processes that it started."""
    key: str = ""
    """The key of a store that no rank has set."""
    gpu: bool = field(default=False, metadata=OMIT_DEFAULT)
    """It waits for a collective through its GPU, which may have other work before that."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts that a rank holds of models trained together, and what torch does with them."""

    wrapped: Fingerprint | None = None
    """The tensors of the model whose DDP it is constructing."""
    replicas: tuple[ReplicaCounts, ...] = ()
    """Its DistributedDataParallel objects: what was counted in this run, without tensors."""
    sharded: tuple[ShardedUnit, ...] = ()
    """The units of the models that FSDP2 shards, of those that it used in this run."""
    pipelines: tuple[PipelinePart, ...] = ()
    """Its parts in torch's pipelines that ran in this run."""
    purpose: str = ""
    """The purpose, to torch, of the collective in which it waits: ``layers.5 (FSDP2, forward)``."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank. Only `rank` and `activity` are always known.

    `rank` is the session's number; `arguments.rank` is what the process itself claims.
    `inside` is what its main thread waits in: a part of setup (store, rendezvous,
    process-group, ddp), a collective, or a key of a store; empty for none.
    `entered` counts its calls of `init_process_group` in this run and `initialized` is true when
    it has a default group.
    """

    rank: int
    activity: Activity = Activity.SILENT
    inside: str = ""
    doing: str = ""
    """Where its main thread is, as readable text."""
    path: tuple[Place, ...] = ()
    """Where that is in the user's code, the outermost line first."""
    run: int = 0
    """The session's number of its current or last cell or script."""
    entered: int = 0
    left: int = 0
    """How many of these calls returned."""
    called_ns: int = 0
    """When the last of these calls began, by CLOCK_MONOTONIC of its host; 0 if unknown."""
    initialized: bool = False
    arguments: InitArguments = field(default_factory=InitArguments)
    file: StoreFile = StoreFile()
    error: RankError = RankError()
    in_threads: tuple[ThreadError, ...] = ()
    """The errors that ended threads of it in this run."""
    handles: ThreadError | None = None
    """The error that its main thread is handling: it is in an `except` or a `finally`."""
    awaits: Awaited = Awaited()
    process: ProcessFacts = ProcessFacts()
    end: ProcessEnd = ProcessEnd()
    network: Network = Network()
    waits_for: int | None = None
    """The number of the collective in which its main thread waits, where it is known which."""
    keys_set: tuple[str, ...] = ()
    """The keys of stores that it has set itself in this run, the last ones."""
    groups_made: tuple[GroupMade, ...] = ()
    """Its last calls of `new_group`, the one that it is in included, the oldest first."""
    splits: Splits | None = None
    """Its splits of the last all_to_all."""
    parts: ModelParts = ModelParts()
    unrecorded: str = ""
    """Why its collectives are not recorded; empty where they are."""


GROUPED: Mapping[str, tuple[str, str]] = {
    **{f"error_{name}": ("error", name) for name in ("type", "text", "at", "category", "remedy")},
    "holder": ("error", "holder"),
    "polls_for": ("awaits", "file"),
    "workers": ("awaits", "workers"),
    "joins": ("awaits", "processes"),
    "key": ("awaits", "key"),
    "pid": ("process", "pid"),
    "process": ("process", "state"),
    "runnable": ("process", "runnable"),
    "main_cpu_s": ("process", "main_cpu_s"),
    "still_s": ("process", "still_s"),
    "cannot_answer": ("process", "cannot_answer"),
    "versions": ("process", "versions"),
    "exit_code": ("end", "code"),
    "last_words": ("end", "last_words"),
    "peak_bytes": ("end", "peak_bytes"),
    "oom_kills": ("end", "oom_kills"),
    "left_at": ("end", "left_at"),
    "host": ("network", "host"),
    "network": ("network", "loopback"),
    "listens": ("network", "listens"),
    "reach": ("network", "reach"),
    "probe": ("network", "probe"),
    "addresses": ("network", "addresses"),
    "model": ("parts", "wrapped"),
    "replicas": ("parts", "replicas"),
    "sharded": ("parts", "sharded"),
    "pipelines": ("parts", "pipelines"),
    "purpose": ("parts", "purpose"),
}
"""Where the fields are that reports had one by one in files of version 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """The reports of all ranks, and what else a diagnosis needs.

    `told` is what the launcher gave every rank (MASTER_ADDR, MASTER_PORT, WORLD_SIZE as
    text). `store_host` is the rank that must host the store, None when the session hosts it.
    """

    ranks: tuple[RankReport, ...]
    told: Mapping[str, str] = field(default_factory=dict)
    store_host: int | None = None
    store_alive: bool = True
    collectives: Collectives = field(default_factory=Collectives)
    sources: Mapping[str, str] = field(default_factory=dict)
    """The user's files and cells, by the names that places have: ``train.py``, ``cell 3``."""
    script: bool = False
    """The processes are a script's own: they end with it, and the session has others."""
    remarks: tuple[Remark, ...] = ()
    """Of who gathered it: no mistakes for certain, and said with each diagnosis of it."""

    @property
    def world_size(self) -> int:
        """Number of processes there are."""
        return len(self.ranks)

    @property
    def files_seen(self) -> set[str]:
        """The files and cells in whose lines ranks were, or called a collective."""
        paths = {id(e.path): e.path for issued in self.collectives.of.values() for e in issued}
        reported = [path for report in self.ranks for path in (report.path, report.error.at)]
        return {place.file for path in (*paths.values(), *reported) for place in path}

    @property
    def waiting(self) -> Ranks:
        """The ranks that wait inside torch."""
        return self.where(Activity.WAITING)

    @property
    def callers(self) -> tuple[RankReport, ...]:
        """The ranks that have called `init_process_group`."""
        return tuple(e for e in self.ranks if e.entered)

    def where(self, *activities: Activity) -> Ranks:
        """The ranks with one of these activities."""
        return tuple(e.rank for e in self.ranks if e.activity in activities)
