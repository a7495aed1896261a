"""The data types of all rooms. Standard library and msgspec only; each can be written as JSON.

board.py           What `%ddp_status` returns: the session as rows of ranks in the same state.
case.py            What a diagnosis needs: a report of each rank, and the user's code.
codec.py           The one codec: values as JSON and back, by the types of their fields.
collective_log.py  The files in which a rank logs its collectives: layout, and how they are read.
collectives.py     The ranks' collectives: one record each, written by every rank's observer.
ddp.py             DDP's construction as values; what each rank holds of each parameter.
diagnosis.py       Findings: what is wrong with a job, the culprits, and the remedy.
doctor.py          What `%ddp_doctor` found: one line per check, each with a verdict and remedy.
events.py          Events: facts, each sent once by the rank that it is about; and messages of them.
fold.py            The state is a fold over events, and where ranks are paused at lines.
ledger.py          One training step: the ranks' records of its parameters, and rows of them.
ranks.py           Rank sets, and how rank sets, sizes and long texts are displayed.
stacks.py          The ranks' stacks as one tree, and their variables as one table.
stages.py          The stages of setup, and the table that a step of the debugger gives.
state.py           What events fold into: the state of each rank, of the session, its output.
training.py        What a rank reports of its training after a run: replicas, optimizers, steps.

A file is loaded when something of it is first asked for here: a rank of an external job loads few
of them while its training starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.model.board import *  # noqa: F403
    from ddp_notebook.model.case import *  # noqa: F403
    from ddp_notebook.model.collectives import *  # noqa: F403
    from ddp_notebook.model.ddp import *  # noqa: F403
    from ddp_notebook.model.diagnosis import *  # noqa: F403
    from ddp_notebook.model.events import *  # noqa: F403
    from ddp_notebook.model.ledger import *  # noqa: F403
    from ddp_notebook.model.ranks import *  # noqa: F403
    from ddp_notebook.model.stacks import *  # noqa: F403
    from ddp_notebook.model.stages import *  # noqa: F403
    from ddp_notebook.model.state import *  # noqa: F403
    from ddp_notebook.model.training import *  # noqa: F403

_FILES = {
    "board": "Board BoardRow Role StackLocation",
    "case": (
        "Activity Awaited Case GROUPED GroupMade ModelParts Network PathChange PipelinePart Probe "
        "ProcessEnd ProcessFacts RankError RankReport ShardedUnit StoreFile ThreadError Worker"
    ),
    "collectives": (
        "DEFAULT_GROUP PLACING CallFacts Collective Collectives Part Phase Place Splits at_place "
        "in_brackets"
    ),
    "ddp": "Bucket BucketPlan Fingerprint HeldParameter HeldParameters Reduction TensorInfo",
    "diagnosis": (
        "HAS_FAILED NOT_SENT Category Decision Diagnosis Excerpt Finding JudgedRun Remark Side "
        "Traceback line_of sentence"
    ),
    "events": (
        "SESSION AnyEvent CellFinished CellStarted Event EventsLost Limited LineLeft LineStopped "
        "Output OutputKind Progress Pulse RankExited RankSpawned StageFailed StageFinished "
        "StagePaused StageStarted StoreFailed StoreOpened decode_events encode_events"
    ),
    "ledger": "LAST_STEP LEDGER_COLUMNS Ledger LedgerRow RankLedger SteppedParameter",
    "ranks": (
        "DASHES Ranks agree are by_value counted cut format_bytes format_ranks name_ranks "
        "parse_ranks said_by them verb without_ports"
    ),
    "stacks": (
        "Branch Doing Frame Local RankStack RankVariables Scope StackTree TensorFacts Unread "
        "Variable VariableCell VariableRow VariableSection VariableTable"
    ),
    "stages": "OWN_STORE PRIVATE_STORE InitArguments Stage StepRow StepTable",
    "state": "Loading Moment OutputGroup OutputItem RankState Snapshot Status exit_text",
    "training": (
        "Claim Copy EvaluationFacts Forwards FunctionalFacts Input LoaderFacts OptimizerFacts "
        "ReplicaCounts ReplicaFacts RunFacts SamplerFacts SplitFacts StepPart StepStart StepTimes "
        "TensorDigest TimedStep WorkFacts"
    ),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(__import__(f"{__name__}.{file}", fromlist=[name]), name)
    globals()[name] = value
    return value


def load() -> None:
    """Load all files: where it does not matter how long it takes, and would later."""
    for name in _FILE_OF:
        __getattr__(name)
