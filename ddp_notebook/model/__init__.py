"""The words and values everything else is made of.

Plain frozen values and the functions that need nothing but them. Standard library only;
everything here can be written as JSON and read back.

    words.py      rank sets, stages, what a rank is at, kinds of output, sizes
    events.py     what ranks say, and its form on the wire
    state.py      what events add up to, and how it is arranged for drawing
    collectives.py  what each rank issued, a record each
    evidence.py   what is known of each rank while set-up runs
    lanes.py      the ranks as the live board draws them
    facts.py      what each rank knows of its training when a run is over
    diagnosis.py  findings: the mistake, whose it is, what to do
    steps.py      what a step of set-up gives
    stacks.py     where ranks are: their stacks, and all of them as one tree
    wrap.py       DDP's construction: its stages, models, buckets
    doctor.py     what the doctor found
    bench.py      what a benchmark measured
    stepbench.py  what a benchmark of training steps measured
    fit.py        the latency and bandwidth that explain it
    saved.py      a run that is kept in a file
    codec.py      values as JSON and back, checked against their types
"""

from ddp_notebook.model.bench import BenchRun
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
from ddp_notebook.model.evidence import (
    Activity,
    InitArguments,
    Probe,
    RankEvidence,
    SetupCase,
    StoreFile,
    Worker,
    evidence_from_json,
    evidence_to_json,
)
from ddp_notebook.model.facts import (
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
from ddp_notebook.model.lanes import Lane, Role, Standing
from ddp_notebook.model.saved import (
    Dropped,
    Moment,
    SavedRun,
    saved_from_json,
    saved_to_json,
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
from ddp_notebook.model.state import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    RankState,
    Snapshot,
)
from ddp_notebook.model.steps import StepRow, StepTable
from ddp_notebook.model.words import (
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
    "SetupCase",
    "RankEvidence",
    "Probe",
    "InitArguments",
    "Lane",
    "Role",
    "Standing",
    "Activity",
    "BenchRun",
    "Board",
    "BoardRow",
    "Branch",
    "Category",
    "CellFinished",
    "CellStarted",
    "Diagnosis",
    "Doing",
    "Dropped",
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
    "SavedRun",
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
    "saved_from_json",
    "saved_to_json",
]
