"""Findings: what is wrong with a job, which ranks are the culprits, and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.codec import OMIT_DEFAULT
from ddp_notebook.model.collectives import Place
from ddp_notebook.model.ranks import Ranks, name_ranks


class Category(StrEnum):
    """The kind of mistake that a finding is about; the value is what is shown and exported."""

    ENV_MISMATCH = "env-mismatch"
    ENV_INVALID = "env-invalid"
    PORT_IN_USE = "port-in-use"
    PORT_EXHAUSTED = "port-exhausted"
    DUPLICATE_RANK = "duplicate-rank"
    MISSING_RANK = "missing-rank"
    WORLD_SIZE_MISMATCH = "world-size-mismatch"
    STRAGGLER = "straggler"
    STALE_STORE = "stale-store"
    STORE_GONE = "store-gone"
    UNREACHABLE_MASTER = "unreachable-master"
    FIREWALL = "firewall"
    HOSTNAME_LOOPBACK = "hostname-loopback"
    WRONG_INTERFACE = "wrong-interface"
    DOUBLE_INIT = "double-init"
    NOTEBOOK_LAUNCH = "notebook-launch"
    VERSION_MISMATCH = "version-mismatch"
    CONDITIONAL_COLLECTIVE = "conditional-collective"
    DIVERGENT_CONTROL_FLOW = "divergent-control-flow"
    MISMATCHED_ORDER = "mismatched-order"
    SHAPE_MISMATCH = "shape-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    OP_MISMATCH = "op-mismatch"
    P2P_MISMATCH = "p2p-mismatch"
    UNSET_KEY = "unset-key"
    """A rank waits for a key of a store that no rank has set or will set."""
    SUBGROUP_MISUSE = "subgroup-misuse"
    UNEVEN_INPUTS = "uneven-inputs"
    ASYNC_MISUSE = "async-misuse"
    BARRIER_MISUSE = "barrier-misuse"
    UNUSED_PARAMS = "unused-params"
    DDP_BYPASS = "ddp-bypass"
    PARAMS_OUTSIDE_DDP = "params-outside-ddp"
    NO_SYNC_MISUSE = "no-sync-misuse"
    BUFFER_SYNC = "buffer-sync"
    REPLICA_DIVERGENCE = "replica-divergence"
    NAN_ON_ONE_RANK = "nan-on-one-rank"
    LOCAL_STATISTIC = "local-statistic"
    METRIC_MISAGGREGATION = "metric-misaggregation"
    WEIGHT_TYING_LOST = "weight-tying-lost"
    RNG_MISMATCH = "rng-mismatch"
    NUMERICS_MISMATCH = "numerics-mismatch"
    SAMPLER_MISUSE = "sampler-misuse"
    DATALOADER_DEADLOCK = "dataloader-deadlock"
    DATALOADER_SHM = "dataloader-shm"
    MISSING_DESTROY = "missing-destroy"
    EXCEPTION_ON_ONE_RANK = "exception-on-one-rank"
    EXCEPTION = "exception"
    """All ranks raised: no rank differs from the others."""
    RANK_DIED = "rank-died"
    EARLY_EXIT = "early-exit"
    OOM_ON_ONE_RANK = "oom-on-one-rank"
    RESOURCE_STARVED = "resource-starved"
    PARAM_MISMATCH = "param-mismatch"
    FILESYSTEM = "filesystem"
    WRONG_PATH_ON_RANK = "wrong-path-on-rank"
    GPU_MAPPING = "gpu-mapping"
    BACKEND_DEVICE_MISMATCH = "backend-device-mismatch"
    MESH_MISMATCH = "mesh-mismatch"
    SHARDING_MISMATCH = "sharding-mismatch"
    SCHEDULE_MISMATCH = "schedule-mismatch"
    SPLIT_MISMATCH = "split-mismatch"
    REPLICA_INPUT_MISMATCH = "replica-input-mismatch"
    CHECKPOINT_MISUSE = "checkpoint-misuse"
    OPTIMIZER_DETACHED = "optimizer-detached"
    CHECKPOINT_REENTRANT = "checkpoint-reentrant"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Side:
    """Where one group of ranks is, and what it does there: shown beside the other groups.

    `state` and `detail` are words: "<ranks> <state> here<detail>".
    """

    ranks: Ranks
    call: str
    """``all_reduce``; if they called nothing, what they did instead."""
    tensor: str = ""
    """``float32 [4]``."""
    place: Place | None = None
    path: tuple[Place, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """The user's lines that lead to `place`, from the one at which the groups part."""
    state: str = field(default="", metadata=OMIT_DEFAULT)
    """``wait``, ``raised``, ``left the loop``."""
    detail: str = field(default="", metadata=OMIT_DEFAULT)
    """``, collective 9``, ``: KeyError: 'x'``."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The line that decides which ranks go which way: ``only rank 0 enters``."""

    place: Place
    label: str = ""


def line_of(place: Place | None) -> Decision | None:
    """The line of a mistake that ranks make there, if it is known."""
    return Decision(place) if place is not None else None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Numbered lines of a file or cell, as they are written."""

    file: str
    lines: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake. `cause` and `remedy` take one line each.

    `ranks` are the culprits: their own action differs from what the correct program needs (all
    ranks, if each has the same mistake). `waiting` are the ranks that only wait; culprits are
    removed from it. `evidence` is the proof, one fact per line. `passing` is true for what may
    resolve by itself: a rank that is late, but works. `commands` are the magics in `remedy`, as
    they are typed.
    """

    category: Category
    ranks: Ranks
    cause: str
    remedy: str
    waiting: Ranks = ()
    evidence: tuple[str, ...] = ()
    passing: bool = False
    commands: tuple[str, ...] = ()
    sides: tuple[Side, ...] = ()
    """Where each group of ranks is."""
    titled: bool = False
    """True if `cause` is a title that stands alone: it names the ranks itself."""
    decides: Decision | None = field(default=None, metadata=OMIT_DEFAULT)
    code: tuple[Excerpt, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """The lines that `sides` and `decides` name, and those around them, where they are known."""
    patch: str = field(default="", metadata=OMIT_DEFAULT)
    """The change of the user's code that corrects it, as lines of a diff, where it is certain."""

    def __post_init__(self) -> None:
        only = tuple(rank for rank in self.waiting if rank not in self.ranks)
        object.__setattr__(self, "waiting", only)

    def died_of(self, ended: Ranks) -> bool:
        """True if it is about dead ranks, and they died because they were `ended`."""
        dead = self.category is Category.RANK_DIED and bool(self.ranks)
        return dead and set(ended).issuperset(self.ranks)

    @property
    def places(self) -> tuple[Place, ...]:
        """The lines that are shown: of each side the first and the last, then what decides."""
        ends = (place for side in self.sides for place in (*side.path[:1], side.place))
        decides = self.decides.place if self.decides is not None else None
        return tuple(dict.fromkeys(place for place in (*ends, decides) if place is not None))

    def with_code(self, sources: Mapping[str, str]) -> Finding:
        """Return it with the lines around its places: `sources` by the names that places have."""
        wanted: dict[str, set[int]] = {}
        for place in self.places:
            around = range(max(1, place.line - _NEAR), place.line + _NEAR + 1)
            wanted.setdefault(place.file, set()).update(around)
        code = []
        for file, numbers in wanted.items():
            lines = sources.get(file, "").splitlines()
            known = [number for number in sorted(numbers) if number <= len(lines)]
            if known:
                shown = ((number, lines[number - 1][:_LONGEST_LINE]) for number in known)
                code.append(Excerpt(file, tuple(shown)))
        return replace(self, code=tuple(code))

    @property
    def sentence(self) -> str:
        """Who, and why."""
        return self.cause if self.titled else sentence(self.ranks, self.cause)

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON object, with its sentence."""
        shown = codec.encode(self)
        del shown["titled"]  # of no use to others: the sentence is there
        return {"sentence": self.sentence, **shown}


def sentence(ranks: Ranks, cause: str) -> str:
    """Return who, and why; a cause that begins with its ranks, or what they did, is a sentence."""
    who = name_ranks(ranks) if ranks else "no rank in particular"
    if cause.startswith(f"{who} "):
        return f"{cause[0].upper()}{cause[1:]}"
    if cause.startswith("raised "):
        return f"{who.capitalize()} {cause}"
    return f"{who.capitalize()}: {cause}"


_NEAR, _LONGEST_LINE = 2, 200
"""How many lines before and after a place are kept, and how much of each."""

HAS_FAILED, NOT_SENT = "failed: ", "not sent: "
"""The prefixes of the text for a rank that raised an error, or met a mismatch."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a run without a problem: one line, and its evidence."""

    kind: str
    """``slow-rank`` or ``ranks-start-ranks``."""
    ranks: Ranks
    text: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Traceback:
    """A traceback that ranks raised, as IPython shows it; `text` may hold ANSI colours."""

    ranks: Ranks
    text: str

    def to_json(self) -> dict[str, Any]:
        """With the text as it is without colours."""
        return {"ranks": list(self.ranks), "text": _COLOURS.sub("", self.text)}


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The run or setup that was diagnosed.

    If it is `over`, its findings were made at `found_at` (local time, ISO 8601), `age_s` seconds
    ago, and no run has begun since.
    """

    title: str
    """``cell 3``, ``train.py``, ``setup``."""
    number: int = 0
    """The notebook's prompt number; 0 for none."""
    over: bool = False
    found_at: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer of `%ddp_why`. Without findings no problem was found.

    `doing` says for each rank what it was doing, in a few words. `tracebacks` are those of the
    ranks that raised in `run`. `unsure` says why the absence of findings proves nothing: ranks are
    still in the run, wait, or failed; empty if it is proof. `notes` name the rules that failed
    themselves, so that their mistakes are not excluded. `remarks` are not mistakes.
    """

    findings: tuple[Finding, ...] = ()
    doing: Mapping[int, str] | None = None
    world_size: int = 0
    tracebacks: tuple[Traceback, ...] = ()
    run: JudgedRun | None = None
    unsure: str = ""
    notes: tuple[str, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @property
    def wrong(self) -> bool:
        """True if there is a problem that does not resolve by itself."""
        return any(not finding.passing for finding in self.findings)

    @property
    def proven(self) -> bool:
        """True if the absence of findings proves that there is no problem."""
        return not (self.unsure or self.notes)

    @property
    def headline(self) -> str:
        """The diagnosis in one line."""
        if self.findings:
            return self.findings[0].sentence
        found = "No problem found, but not everything could be checked." if self.notes else ""
        return self.unsure or found or "No problem found."

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as a JSON object; `json.dumps` takes it as it is."""
        return {
            "headline": self.headline,
            "world_size": self.world_size,
            "run": codec.encode(self.run) if self.run is not None else None,
            "findings": [finding.to_json() for finding in self.findings],
            "tracebacks": [traceback.to_json() for traceback in self.tracebacks],
            "doing": codec.encode(dict(sorted((self.doing or {}).items()))),
            "notes": list(self.notes),
            "remarks": [codec.encode(remark) for remark in self.remarks],
        }

    def __str__(self) -> str:
        return json.dumps(self.to_json(), indent=2)
