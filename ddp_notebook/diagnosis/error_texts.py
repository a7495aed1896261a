"""Error texts of torch, gloo, NCCL and torchrun: what each means, and what can have caused it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
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
            causes = tuple(dict.fromkeys((*known.causes, *_by_literals(match[0]))))
            lines = [_quoted(match), f"  {catalogue.words(f'texts.{known.text}.means')}"]
            if len(causes) > 1:
                lines += _one_of(causes)
            elif causes:
                lines.append(f"  More: ddp-notebook explain {causes[0].value}")
            found.append("\n".join(lines))
    found += _from_pages(text, "\n".join(found))
    return "\n\n".join(dict.fromkeys(found)) or None


def _from_pages(text: str, told: str) -> Iterator[str]:
    """Explain what the literal texts of pages in `text` lead to, and is not `told` already."""
    causes: dict[str, list[Category]] = {}
    for category, quoted in _by_literals(text).items():
        if not re.search(rf"(?<![\w-]){category}(?![\w-])", told):
            causes.setdefault(quoted, []).append(category)
    for quoted, categories in causes.items():
        if len(categories) > 1:
            yield "\n".join([quoted, *_one_of(categories)])
        else:
            page = catalogue.entry(categories[0])["page"]
            means, fix = (" ".join(page[key].split()) for key in ("means", "fix"))
            yield f"{quoted}  [{categories[0]}]\n  {means}\n  fix: {fix}"


def _by_literals(text: str) -> dict[Category, str]:
    """Return the categories that a literal text of theirs in `text` leads to, and it in quotes."""
    found: dict[Category, str] = {}
    for category in Category:
        for literal in catalogue.literals(category):
            words = (r".{1,80}?".join(map(re.escape, w.split("…"))) for w in literal.split())
            if match := re.search(r"\s+".join(words), text, re.IGNORECASE):
                found.setdefault(category, _quoted(match))
    return found


def _one_of(causes: Sequence[Category]) -> list[str]:
    return [
        "  Look first at the rank that printed nothing, or something else.",
        f"  Possible causes: {', '.join(causes)}",
        "  Which one it is: ddp-notebook why LOGS, or run it under %ddp_run",
    ]


def near(word: str) -> list[str]:
    """Return the categories whose names are nearly `word`."""
    return difflib.get_close_matches(word.strip(), [category.value for category in Category], 3)


def _quoted(match: re.Match[str]) -> str:
    return f"`{cut(' '.join(match[0].split()), 80)}`"
