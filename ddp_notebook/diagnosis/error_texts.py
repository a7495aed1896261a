"""Error texts of torch, gloo, NCCL and torchrun: what each means, and what can have caused it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.setup.torch_errors import MEANINGS
from ddp_notebook.model import Category, cut

_C = Category


@dataclass(frozen=True, slots=True)
class _SeveralCauses:
    """A text that says what happened to the rank that prints it, and not why."""

    pattern: re.Pattern[str]
    text: str
    """Its name in ``messages/texts.toml``, which says what it means."""
    causes: tuple[Category, ...]


def _several(pattern: str, text: str, *causes: Category) -> _SeveralCauses:
    return _SeveralCauses(re.compile(pattern, re.IGNORECASE), text, causes)


_DIVERGED = (
    _C.CONDITIONAL_COLLECTIVE,
    _C.DIVERGENT_CONTROL_FLOW,
    _C.UNEVEN_INPUTS,
    _C.EXCEPTION_ON_ONE_RANK,
    _C.RANK_DIED,
    _C.STRAGGLER,
)
# The texts are those that people quote: pytorch/pytorch#118369, verl-project/verl#1158,
# hiyouga/LLaMA-Factory#7396, snowflakedb/ArcticTraining#219.
_TEXTS = (
    _several(
        r"Watchdog caught collective operation timeout"
        r"|Timed out waiting \d+ms for (?:recv|send)\w* operation",
        "not-joined",
        *_DIVERGED,
    ),
    _several(
        r"watchdog got stuck for \d+|heartbeat monitor",
        "watchdog-blocked",
        *_DIVERGED,
    ),
    _several(
        r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited|Socket closed"
        r"|failed to recv, got 0 bytes|ncclRemoteError",
        "lost-connection",
        _C.EXCEPTION_ON_ONE_RANK,
        _C.RANK_DIED,
        _C.EARLY_EXIT,
        _C.STORE_GONE,
    ),
    _several(
        r"\d+/\d+ clients joined|client socket has timed out|RendezvousTimeoutError"
        r"|RendezvousConnectionError|Socket Timeout",
        "not-found",
        _C.MISSING_RANK,
        _C.UNREACHABLE_MASTER,
        _C.ENV_MISMATCH,
        _C.WORLD_SIZE_MISMATCH,
        _C.FIREWALL,
    ),
    _several(
        r"wait timeout after \d+ms, keys",
        "key-not-set",
        _C.MISSING_RANK,
        _C.DUPLICATE_RANK,
        _C.UNSET_KEY,
    ),
    _several(
        r"failed to pass monitoredBarrier|monitoredBarrier.*timed out",
        "barrier-not-reached",
        *_DIVERGED,
    ),
    _several(
        r"Detected mismatch between collectives on ranks",
        "calls-differ",
        _C.MISMATCHED_ORDER,
        _C.SHAPE_MISMATCH,
        _C.DTYPE_MISMATCH,
        _C.OP_MISMATCH,
        _C.CONDITIONAL_COLLECTIVE,
    ),
    _several(
        r"ChildFailedError|exit ?code\s*:? *-\d+",
        "child-failed",
        _C.EXCEPTION_ON_ONE_RANK,
        _C.RANK_DIED,
        _C.OOM_ON_ONE_RANK,
    ),
    _several(
        r"SignalException|closing signal SIG\w+|got signal: \d+",
        "ended-by-signal",
    ),
    _several(
        r"destroy_process_group\(\) was not called",
        "not-destroyed",
        _C.MISSING_DESTROY,
    ),
    _several(
        r"Default process group has not been initialized",
        "no-group",
    ),
    _several(
        r"ncclUnhandledCudaError|unhandled cuda error",
        "cuda-in-nccl",
        _C.EXCEPTION_ON_ONE_RANK,
        _C.OOM_ON_ONE_RANK,
        _C.GPU_MAPPING,
    ),
)


def explain(text: str) -> str | None:
    """Return what the category or the error texts in `text` mean; None if nothing is known."""
    word = text.strip()
    if word in set(Category):
        return catalogue.page(Category(word))
    found = []
    for meaning in MEANINGS:
        if match := meaning.pattern.search(text):
            title, fix = (
                catalogue.words(
                    f"{meaning.kind}.{part}",
                    ranks=("this rank",),
                    waiting=(),
                    found=meaning.found(match),
                )
                for part in ("title", "fix")
            )
            category = meaning.kind.partition(".")[0]
            found.append(f"{_quoted(match)}  [{category}]\n  {title}.\n  Fix: {fix}")
    for known in _TEXTS:
        if match := known.pattern.search(text):
            lines = [_quoted(match), f"  {catalogue.words(f'texts.{known.text}.means')}"]
            if len(known.causes) > 1:
                lines += [
                    "  Look first at the rank that printed nothing, or something else.",
                    f"  Possible causes: {', '.join(known.causes)}",
                    "  Which one it is: ddp-notebook why LOGS, or run it under %ddp_run",
                ]
            elif known.causes:
                lines.append(f"  More: ddp-notebook explain {known.causes[0].value}")
            found.append("\n".join(lines))
    return "\n\n".join(dict.fromkeys(found)) or None


def near(word: str) -> list[str]:
    """Return the categories whose names are nearly `word`."""
    return difflib.get_close_matches(word.strip(), [category.value for category in Category], 3)


def _quoted(match: re.Match[str]) -> str:
    return f"`{cut(' '.join(match[0].split()), 80)}`"
