"""The words and values everything else is made of.

Plain frozen values and the functions that need nothing but them. Standard library only;
everything here can be written as JSON and read back.

    words.py   rank sets, stages, what a rank is at, kinds of output, sizes
    events.py  what ranks say, and its form on the wire
    state.py   what events add up to, and how it is arranged for drawing
    bench.py   what a benchmark measured
"""

from ddp_notebook.model.bench import (
    BenchPoint,
    BenchResult,
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
    StageStarted,
    StoreFailed,
    StoreOpened,
    decode,
    encode,
)
from ddp_notebook.model.state import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    RankState,
    Snapshot,
)
from ddp_notebook.model.words import (
    QUIET,
    SESSION,
    OutputKind,
    Ranks,
    Stage,
    Status,
    format_bytes,
    format_ranks,
    name_ranks,
    parse_ranks,
)

__all__ = [
    "BenchPoint",
    "BenchResult",
    "Board",
    "BoardRow",
    "CellFinished",
    "CellStarted",
    "EVENT_KINDS",
    "Event",
    "EventsLost",
    "Output",
    "OutputGroup",
    "OutputItem",
    "OutputKind",
    "Progress",
    "Pulse",
    "QUIET",
    "RankExited",
    "RankSpawned",
    "RankState",
    "Ranks",
    "SESSION",
    "Snapshot",
    "Stage",
    "StageFailed",
    "StageFinished",
    "StageStarted",
    "Status",
    "StoreFailed",
    "StoreOpened",
    "decode",
    "encode",
    "format_bytes",
    "format_ranks",
    "name_ranks",
    "parse_ranks",
]
