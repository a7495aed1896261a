"""Values everything else is made of. Standard library only; each can be written as JSON and read.

board.py           The ranks as the live board draws them: a lane each, or one for several in th
case.py            What is known of each rank while set-up runs: the facts that findings are mad
codec.py           Values of the model as JSON and back, by the types of their fields.
collective_log.py  The file in which a rank writes down its collectives, as both ends know it.
collectives.py     What the ranks' collectives were: one record each, as every rank's observer w
ddp.py             DDP's construction as values: its stages, what a model is made of, who change
diagnosis.py       Findings: what is wrong with a job, whose doing it is, and what to do about i
doctor.py          What `%ddp_doctor` found: one line per check, each with a verdict and what to
events.py          What ranks say: events, and their form on the wire.
ranks.py           The field's words: rank sets, stages, what a rank is at, kinds of output, siz
stacks.py          Where ranks are: the Python stack of each, and all of them as one tree.
stages.py          What a step of set-up, or of DDP's construction, gives: who arrived where, wh
state.py           What events add up to, and how it is arranged for drawing.
training.py        What a rank knows of its training when a run is over: replicas, optimizers, s
"""

from ddp_notebook.model.board import Lane, Role, Standing
from ddp_notebook.model.case import (
    Activity,
    Case,
    InitArguments,
    Probe,
    RankReport,
    StoreFile,
    Worker,
    evidence_from_json,
    evidence_to_json,
)
from ddp_notebook.model.collectives import (
    DEFAULT_GROUP,
    Collective,
    Collectives,
    Part,
    Phase,
    Place,
    collective_from_json,
    collective_to_json,
)
from ddp_notebook.model.diagnosis import (
    Category,
    Diagnosis,
    Finding,
    diagnosis_from_json,
    finding_from_json,
)
from ddp_notebook.model.events import (
    EVENT_KINDS,
    CellFinished,
    CellStarted,
    Event,
    EventsLost,
    Output,
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
    decode,
    encode,
)
from ddp_notebook.model.ranks import (
    QUIET,
    SESSION,
    OutputKind,
    Ranks,
    Stage,
    Status,
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
    StackTree,
    rank_stack_from_json,
    rank_stack_to_json,
    stack_tree_from_json,
)
from ddp_notebook.model.stages import StepRow, StepTable
from ddp_notebook.model.state import (
    Board,
    BoardRow,
    Moment,
    OutputGroup,
    OutputItem,
    RankState,
    Snapshot,
)
from ddp_notebook.model.training import (
    LoaderFacts,
    OptimizerFacts,
    ParallelFacts,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    TensorDigest,
    facts_from_json,
    facts_to_json,
)

__all__ = [
    "DEFAULT_GROUP",
    "Collective",
    "Collectives",
    "Part",
    "Phase",
    "Place",
    "collective_from_json",
    "collective_to_json",
    "LoaderFacts",
    "OptimizerFacts",
    "ParallelFacts",
    "ReplicaFacts",
    "RunFacts",
    "SamplerFacts",
    "TensorDigest",
    "facts_from_json",
    "facts_to_json",
    "evidence_to_json",
    "evidence_from_json",
    "StoreFile",
    "Worker",
    "Case",
    "RankReport",
    "Probe",
    "InitArguments",
    "Lane",
    "Role",
    "Standing",
    "Activity",
    "Board",
    "BoardRow",
    "Branch",
    "Category",
    "CellFinished",
    "CellStarted",
    "Diagnosis",
    "Doing",
    "EVENT_KINDS",
    "Event",
    "EventsLost",
    "Finding",
    "Frame",
    "Local",
    "Moment",
    "Output",
    "OutputGroup",
    "OutputItem",
    "OutputKind",
    "Progress",
    "Pulse",
    "QUIET",
    "RankExited",
    "RankSpawned",
    "RankStack",
    "RankState",
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
    "decode",
    "diagnosis_from_json",
    "encode",
    "finding_from_json",
    "cut",
    "format_bytes",
    "format_ranks",
    "name_ranks",
    "parse_ranks",
    "rank_stack_from_json",
    "rank_stack_to_json",
    "stack_tree_from_json",
]
