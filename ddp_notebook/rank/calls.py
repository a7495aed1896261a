"""Every remote call, once: what the session can ask of a rank, with its types.

A `Call` runs on the rank's main thread and is pickled. An `Order` runs there too, is JSON and has
no answer: events report its outcome. A `Question` is answered by a thread of ours, even while the
main thread is blocked, and is JSON. `runtime.py` says which function answers each. The notebook
kernel imports this: no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from ddp_notebook.launch.timeouts import GROUP_TIMEOUT
from ddp_notebook.model import (
    Frame,
    Probe,
    RankLedger,
    RankReport,
    Ranks,
    RankStack,
    RankVariables,
    RunFacts,
    Stage,
    StepTimes,
)
from ddp_notebook.model.ddp import (
    BucketPlan,
    Fingerprint,
    HeldParameters,
    RankFailure,
    Reduction,
    Synced,
)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call(Generic[Request, Answer]):
    """A call to the main thread. `name` is what goes over the wire."""

    name: str


@dataclass(frozen=True, slots=True)
class Order(Generic[Request]):
    """Something to run on the main thread. The type says how `model.codec` reads its JSON."""

    name: str
    request: type[Request]


@dataclass(frozen=True, slots=True)
class Question(Generic[Request, Answer]):
    """A question to a thread of ours. The types say how `model.codec` reads its JSON."""

    name: str
    request: type[Request]
    answer: type[Answer]


class Message(msgspec.Struct, frozen=True):
    """A value that travels between the session and a rank: a request, or an answer."""


class CannotAnswer(Message, frozen=True):
    """In place of an answer: the rank is reachable but cannot answer this. `why` is an error."""

    why: str


def answered(answers: Mapping[int, Answer | CannotAnswer]) -> dict[int, Answer]:
    """The answers of the ranks that could give one."""
    return {r: answer for r, answer in answers.items() if not isinstance(answer, CannotAnswer)}


class Nothing(Message, frozen=True):
    """A question that needs no more than its name."""


# -- setup --------------------------------------------------------------------------------


class SetUpPlan(Message, frozen=True):
    """How a rank is to be set up. `settings` is what its environment has beyond torchrun's.

    `store` is session, or rank0: the rank whose RANK is 0 hosts it. `patient`: no stage
    times out, because the user steps through them.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    init_method: str
    master_addr: str
    master_port: int
    store_path: str
    generation: int
    timeout_s: float
    threads: int
    store: str = "session"
    patient: bool = False
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    local: tuple[int, int] | None = None
    """LOCAL_RANK and LOCAL_WORLD_SIZE; None: all ranks are on one host."""

    @property
    def timeout(self) -> timedelta:
        """How long setup may wait in one stage."""
        return GROUP_TIMEOUT if self.patient else timedelta(seconds=self.timeout_s)


BRING_UP: Call[SetUpPlan, bool] = Call("bring up")
"""Pass all stages of setup; False when one failed (an event says why)."""
PREPARE: Call[SetUpPlan, None] = Call("prepare")
"""Pause before the first stage of setup."""
ADVANCE: Call[Stage, bool] = Call("advance")
"""Go on through this stage; False when one failed (an event says why)."""


class Freed(Message, frozen=True):
    """How many connections of torch's were shut down to unblock a main thread."""

    closed: int


FREE = Question("free", Nothing, Freed)
"""End what torch waits for in setup or a collective. Its process group is broken afterwards."""


# -- cells and scripts ---------------------------------------------------------------------


class Cell(Message, frozen=True):
    """A cell: `cell` is the session's number of it, `number` its prompt ``In [number]``.

    `paused`: it stops before each collective until it is stepped. `colors`: IPython's setting in
    the notebook, for tracebacks; empty leaves the rank's own. `as_gpus`: its CPU stands for so
    many GPUs; 0: for none. `ledger`: the training step that is recorded for a ledger; 0: none.
    """

    cell: int
    number: int
    magic_line: str
    source: str
    paused: bool = False
    colors: str = ""
    as_gpus: int = 0
    ledger: int = 0


class Script(Message, frozen=True):
    """A script, for a process of its own. `cell` is the session's number of the run, `number` the
    prompt's. `paused`: it stops before each collective until it is stepped.
    """

    cell: int
    number: int
    path: str
    name: str
    """How it was called: its `sys.argv[0]`."""
    arguments: tuple[str, ...]
    threads: int
    """Of torch, for one operation: what OMP_NUM_THREADS says to a new process."""
    breakpoints: Breakpoints
    paused: bool = False
    leaves: bool = False
    """Peers that need this rank after it has finished lose their connection instead of waiting."""
    package: str | None = None
    """The name of a module that is run by it, as `python -m` does; None for a script."""
    world_size: int = 1
    """In how many processes it runs."""
    as_gpus: int = 0
    """As for a cell."""
    ledger: int = 0
    """As for a cell."""


RUN_CELL = Order("run cell", Cell)
"""Run a cell without top-level `await`, to its end; events say how it ended."""
START_CELL = Order("start cell", Cell)
"""Start a cell with top-level `await` in the engine's own loop; returns at once."""


class PausedAt(Message, frozen=True):
    """The number of the collective before which the rank was paused; None when it was not."""

    collective: int | None


STEP = Question("step", Nothing, PausedAt)
"""Let a rank that is paused before a collective go on to its next one."""
RESUME = Question("resume", Nothing, PausedAt)
"""Stop pausing the rank before collectives."""


# -- the debugger --------------------------------------------------------------------------


class How(StrEnum):
    """The ways to continue from a line."""

    NEXT = "next"
    """To the next line of this function, or of its caller once it has returned."""
    INTO = "into"
    """To the next line of the user's, in a function that is called as well."""
    OUT = "out"
    """Until this function has returned: to the next line of its caller."""
    LINE = "line"
    """To a line of this function, or of its caller once it has returned."""
    COLLECTIVE = "collective"
    """To the next collective."""
    END = "end"
    """To the next breakpoint, or the end."""


class Move(Message, frozen=True):
    """How a rank that is paused at a line continues."""

    how: How
    line: int = 0


class Moved(Message, frozen=True):
    """The number of the stop that the rank left, 0 for none; or why it did not leave it.

    `collective`: the number of the collective before which it was paused instead.
    """

    stop: int
    problem: str = ""
    collective: int | None = None


ON = ("exception", "nan", "collective")
"""The events that a breakpoint can be set on: an error that ends what runs, a loss or a gradient
that is not finite, a collective that is about to be issued."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place to stop at: a line of a file or a cell, or the beginning of a function.

    `file` is a path, or a cell's file name on the ranks; empty when `function` says where.
    `text` is the cell's, for a rank where it did not run. `ranks` None is all of them. From the
    `count`th pass on it stops; `once`: and never again. With `log` it does not stop: it prints
    that, filled in as an f-string is. `on` is what it is set on in place of a line: see `ON`.
    """

    number: int
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    ranks: Ranks | None = None
    condition: str = ""
    count: int = 1
    once: bool = False
    log: str = ""
    on: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """A breakpoint on one rank: where it is, 0 for a line that is not loaded yet.

    `loaded`: its file was imported. `note` is where it does not stop. `passes` is how often
    the rank came by where its condition held. `done`: it was for once.
    """

    number: int
    file: str = ""
    line: int = 0
    problem: str = ""
    passes: int = 0
    done: bool = False
    loaded: bool = True
    note: str = ""


class Breakpoints(Message, frozen=True):
    """The breakpoints of a rank, all of them. Not `enabled`: they are kept and passed.

    `may_stop`: some rank, maybe another one, has one that pauses it.
    """

    breakpoints: tuple[Breakpoint, ...]
    enabled: bool = True
    may_stop: bool = False


class Bounds(Message, frozen=True):
    """Where the breakpoints of a rank are."""

    bounds: tuple[Bound, ...]


class Expression(Message, frozen=True):
    """An expression for a rank to evaluate, in the frame that is so many above where it stands.

    `assign`: it is an assignment to be carried out. `own_text`: its value as its own `repr` has
    it, which is the user's code. `everywhere`: all ranks stand at lines and evaluate it now.
    """

    source: str
    up: int = 0
    assign: bool = False
    own_text: bool = False
    everywhere: bool = False


class Evaluated(Message, frozen=True):
    """The value of an expression, under the expression's own name; or why it has no value."""

    value: RankVariables | None = None
    problem: str = ""


class Standing(Message, frozen=True):
    """The user's frames where a rank stands, the innermost first. `busy`: it computes there."""

    frames: tuple[Frame, ...] = ()
    busy: bool = False


class TensorPart(Message, frozen=True):
    """Values of the tensor that an expression gave last, from `begin` up to `end`."""

    begin: int
    end: int


MOST_VALUES = 1024
"""How many values of a tensor are reported one by one."""


class Checksums(Message, frozen=True):
    """Of each `step` values of such a part. `step` 0: the tensor is gone, or cannot be read."""

    of: tuple[int, ...] = ()
    step: int = 0
    values: tuple[float | None, ...] = ()
    """The values of a part that has few; None for what is NaN or infinite."""


CHECKSUMS = Question("checksums", TensorPart, Checksums)
"""Digests that show in which part of a tensor two ranks differ."""
STANDING = Question("standing", Nothing, Standing)
"""In which frames of the user's a rank stands, or has raised."""
EVALUATE = Question("evaluate", Expression, Evaluated)
"""The value of an expression where the rank stands: at a line, in a collective, or idle."""
MOVE = Question("move", Move, Moved)
"""Let a rank that is paused at a line go on."""
SET_BREAKPOINTS = Question("set breakpoints", Breakpoints, Bounds)
"""Have these breakpoints in place of all others."""
ARM = Question("arm", Nothing, Nothing)
"""Another rank of the run is paused: collectives issued from now on have no short timeouts."""
BREAKPOINTS = Question("breakpoints", Nothing, Bounds)
"""Where they are, and how often they were passed."""


class VariableToSend(Message, frozen=True):
    """A variable to be sent. Unless `keep_tensors`, tensors become NumPy arrays."""

    name: str
    keep_tensors: bool


class PickledValue(Message, frozen=True):
    """A variable, as a pickle: reading it may run the user's code, which is for the caller to
    guard. `error` says why it cannot be sent, empty when it can."""

    pickle: bytes = b""
    error: str = ""


GET_VALUE: Call[VariableToSend, PickledValue] = Call("get value")


PULL = Question("pull", VariableToSend, PickledValue)
"""Describe a variable of a rank that is idle and takes no calls: its script is over."""


class CodeToComplete(Message, frozen=True):
    """A place in a cell that is being written, for Tab."""

    code: str
    at: int


class Completions(Message, frozen=True):
    """Completions that may replace the code from `start` to the cursor, and their types."""

    start: int
    texts: tuple[tuple[str, str], ...] = ()


class NameToInspect(Message, frozen=True):
    """An expression to describe, and at which level of detail, in IPython's terms."""

    name: str
    detail: int = 0
    leave_out: tuple[str, ...] = ()


class Inspection(Message, frozen=True):
    """Signature, docstring and more of an object as a MIME bundle; empty: there is no such."""

    bundle: Mapping[str, str] = msgspec.field(default_factory=dict)


COMPLETE: Call[CodeToComplete, Completions] = Call("complete")
"""The completions of the rank's IPython, without Jedi."""
INSPECT: Call[NameToInspect, Inspection] = Call("inspect")
"""Return what the rank's IPython knows of an object."""


# -- what a rank knows ---------------------------------------------------------------------


class Targets(Message, frozen=True):
    """Where other ranks listen, as ``address:port``."""

    targets: tuple[str, ...]


class Reached(Message, frozen=True):
    """How the connections to these targets went; a rank's own are left out."""

    probes: tuple[Probe, ...]


class StackRequest(Message, frozen=True):
    """A stack, with the variables of the user's frames or without."""

    with_locals: bool = False


class VariablesRequest(Message, frozen=True):
    """The variables of these names; all without any."""

    names: tuple[str, ...] = ()


class SoftwareFacts(Message, frozen=True):
    """Versions, backends, the environment: see `inspect.facts`."""

    facts: Mapping[str, Any]


REPORT = Question("report", Nothing, RankReport)
"""This rank's report about itself."""
REACH = Question("reach", Targets, Reached)
"""Which other ranks it can connect to."""
STACK = Question("stack", StackRequest, RankStack)
"""Where its main thread is."""
VARIABLES = Question("variables", VariablesRequest, RankVariables)
"""Return its variables."""
RUN_FACTS = Question("run facts", Nothing, RunFacts)
"""Return the summary of its training in the run that is over. Only when nothing runs."""
LEDGER = Question("ledger", Nothing, RankLedger)
"""Return what it recorded of a training step. Only when the run that was asked for one is over."""
STEP_TIMES = Question("step times", Nothing, StepTimes)
"""The parts of its newest training steps. Any time."""
SOFTWARE = Question("software", Nothing, SoftwareFacts)
"""Return the facts of its software and hardware."""
HELD = Question("held", Nothing, HeldParameters)
"""Return its part of the parameters of its models. Any time."""


# -- the construction of a DDP object: a rank that cannot answers with a `RankFailure` --------


class ModelName(Message, frozen=True):
    """The user's variable of that name."""

    name: str


class Described(Message, frozen=True):
    """A description of a variable. `kind`: absent, other, module or ddp.

    `problem` says why a module cannot be wrapped, empty when it can.
    """

    kind: str
    type: str
    problem: str = ""


class ModelToCompare(Message, frozen=True):
    """A model, and whether its values are hashed too."""

    name: str
    hashed: bool


class Compared(Message, frozen=True):
    """A model's tensors, with a hash of each one's values where it was asked for."""

    contents: Fingerprint
    hashes: tuple[str, ...]


class DDPOptions(Message, frozen=True):
    """A model and the options with which it is wrapped. `cap_mb` None is torch's own."""

    name: str
    cap_mb: float | None
    find_unused: bool


class Constructed(Message, frozen=True):
    """A DDP object. `hooks`: on how many parameters its reducer waits. `sizes`: of its buckets,
    in bytes."""

    hooks: int
    sizes: tuple[int, ...]


class Assignment(Message, frozen=True):
    """The DDP object made of `name` goes into the variable `target`; empty: it is forgotten."""

    name: str
    target: str


DESCRIBE: Call[ModelName, Described | RankFailure] = Call("describe")
COMPARE: Call[ModelToCompare, Compared | RankFailure] = Call("compare")
VERIFY: Call[ModelName, Nothing | RankFailure] = Call("verify")
BROADCAST: Call[ModelName, Synced | RankFailure] = Call("broadcast")
PLAN_BUCKETS: Call[DDPOptions, BucketPlan | RankFailure] = Call("plan buckets")
CONSTRUCT: Call[DDPOptions, Constructed | RankFailure] = Call("construct")
ASSIGN: Call[Assignment, bool] = Call("assign")
REDUCTION: Call[ModelName, Reduction | RankFailure] = Call("reduction")


# -- benchmarks ----------------------------------------------------------------------------


class BenchDevice(Message, frozen=True):
    """The device that a benchmark will use: ``cpu`` or ``cuda``, each rank's own."""

    device: str


class BenchRequest(Message, frozen=True):
    """A benchmark of collectives, for one of `members`. `plan` is `bench.plan.Plan` as JSON.

    `backend` is that of the group it makes for it; empty for the one that is there, if all of
    its ranks take part. `number` is the same on all members and another one each time.
    """

    plan: Mapping[str, Any]
    members: tuple[int, ...]
    backend: str
    device: str
    number: int


class StepsRequest(Message, frozen=True):
    """A benchmark of training steps. `plan` is `bench.steps.StepPlan` as JSON."""

    plan: Mapping[str, Any]
    device: str
    members: Ranks


class StepsMeasurement(Message, frozen=True):
    """Which batch sizes of the prepared model are measured; `alone`: one rank by itself too."""

    batches: tuple[int, ...]
    alone: bool
    members: Ranks
    number: int
    """As in a `BenchRequest`."""


BENCH_FACTS: Call[BenchDevice, dict[str, Any] | RankFailure] = Call("bench facts")
BENCH: Call[BenchRequest, dict[str, Any] | RankFailure] = Call("bench")
PREPARE_STEPS: Call[StepsRequest, dict[str, Any] | RankFailure] = Call("prepare steps")
MEASURE_STEPS: Call[StepsMeasurement, dict[str, Any] | RankFailure] = Call("measure steps")
FORGET_STEPS: Call[Nothing, RankFailure | None] = Call("forget steps")
