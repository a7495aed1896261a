"""Values everything else is made of. Standard library only; each can be written as JSON and read.

board.py           What `%ddp_status` returns: the session as rows of ranks in the same state.
case.py            What is known of each rank while set-up runs: the facts that findings are mad
codec.py           The one codec: values as JSON and back, by the types of their fields.
collective_log.py  The file in which a rank logs its collectives: its layout, and how it is read.
collectives.py     What the ranks' collectives were: one record each, as every rank's observer w
ddp.py             DDP's construction as values: its stages, what a model is made of, who change
diagnosis.py       Findings: what is wrong with a job, whose doing it is, and what to do about i
doctor.py          What `%ddp_doctor` found: one line per check, each with a verdict and what to
events.py          Events: facts, each sent once by the rank that it is about; and messages of them.
ranks.py           Rank sets, and how they, sizes and long texts are written for a person.
stacks.py          Where ranks are and what they have there: stacks as one tree, variables as on
stages.py          The stages of set-up, and the table that a step of the debugger gives.
state.py           What events add up to: the state of each rank, of the session, and its output.
training.py        What a rank knows of its training when a run is over: replicas, optimizers, s
"""

from ddp_notebook.model.board import Board, BoardRow, Role, StackLocation
from ddp_notebook.model.case import (
    Activity,
    Case,
    Child,
    InitArguments,
    Probe,
    RankReport,
    StoreFile,
    ThreadError,
    Worker,
)
from ddp_notebook.model.collectives import (
    DEFAULT_GROUP,
    Collective,
    Collectives,
    Part,
    Phase,
    Place,
)
from ddp_notebook.model.diagnosis import (
    Category,
    Diagnosis,
    Finding,
    JudgedRun,
    Side,
    Traceback,
)
from ddp_notebook.model.events import (
    SESSION,
    CellFinished,
    CellStarted,
    Event,
    EventsLost,
    Limited,
    Output,
    OutputKind,
    Progress,
    Pulse,
    RankExited,
    RankSpawned,
    StageFailed,
    StageFinished,
    StagePaused,
    StageStarted,
    StoreFailed,
    StoreOpened,
    decode_events,
    encode_events,
)
from ddp_notebook.model.ranks import (
    Ranks,
    cut,
    format_bytes,
    format_ranks,
    name_ranks,
    parse_ranks,
)
from ddp_notebook.model.stacks import (
    Branch,
    Doing,
    Frame,
    Local,
    RankStack,
    RankVariables,
    Scope,
    StackTree,
    TensorFacts,
    Unread,
    Variable,
    VariableCell,
    VariableRow,
    VariableSection,
    VariableTable,
)
from ddp_notebook.model.stages import Stage, StepRow, StepTable
from ddp_notebook.model.state import (
    Loading,
    Moment,
    OutputGroup,
    OutputItem,
    RankState,
    Snapshot,
    Status,
)
from ddp_notebook.model.training import (
    LoaderFacts,
    OptimizerFacts,
    ParallelFacts,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    TensorDigest,
)

__all__ = [
    "DEFAULT_GROUP",
    "Collective",
    "Collectives",
    "Part",
    "Phase",
    "Place",
    "LoaderFacts",
    "OptimizerFacts",
    "ParallelFacts",
    "ReplicaFacts",
    "RunFacts",
    "SamplerFacts",
    "TensorDigest",
    "StoreFile",
    "ThreadError",
    "Worker",
    "Case",
    "Child",
    "RankReport",
    "Probe",
    "InitArguments",
    "JudgedRun",
    "Role",
    "StackLocation",
    "Activity",
    "Board",
    "BoardRow",
    "Branch",
    "Category",
    "CellFinished",
    "CellStarted",
    "Diagnosis",
    "Doing",
    "Event",
    "EventsLost",
    "Limited",
    "Finding",
    "Side",
    "Frame",
    "Local",
    "Loading",
    "Moment",
    "Output",
    "OutputGroup",
    "OutputItem",
    "OutputKind",
    "Progress",
    "Pulse",
    "RankExited",
    "RankSpawned",
    "RankStack",
    "RankState",
    "RankVariables",
    "Scope",
    "TensorFacts",
    "Unread",
    "Variable",
    "VariableCell",
    "VariableRow",
    "VariableSection",
    "VariableTable",
    "Ranks",
    "SESSION",
    "Snapshot",
    "StackTree",
    "StepRow",
    "StepTable",
    "Stage",
    "StageFailed",
    "StageFinished",
    "StagePaused",
    "StageStarted",
    "Status",
    "StoreFailed",
    "StoreOpened",
    "Traceback",
    "decode_events",
    "encode_events",
    "cut",
    "format_bytes",
    "format_ranks",
    "name_ranks",
    "parse_ranks",
]
