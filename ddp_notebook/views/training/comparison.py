"""A run compared with the same on one rank, as text."""

from __future__ import annotations

from ddp_notebook.model import Place, counted, name_ranks
from ddp_notebook.model.against.comparison import Comparison, Parting
from ddp_notebook.views.paragraphs import indented

_WHAT = {
    "start": "the values of {} before step {}",
    "backward": "the gradient of {} after backward in step {}",
    "gradient": "the gradient of {} that the optimizer uses in step {}",
    "update": "the values of {} after step {}",
}


def comparison_text(compared: Comparison) -> str:
    """What a comparison gives, and what it takes for granted."""
    ranks = f"{compared.world_size} ranks"
    parting = compared.parting
    if parting is not None:
        lines = [
            f"Against one rank: PARTED in step {parting.step}, at {parting.parameter}.",
            *_parting_lines(parting, compared),
        ]
    elif not compared.steps:
        lines = [indented(f"{compared.refused}", "Against one rank: CANNOT COMPARE: ")]
    else:
        first = f"the first {compared.steps}" if compared.refused else f"all {compared.steps}"
        lines = [
            indented(
                f"{ranks} compute what one rank does in {first} training steps, but for rounding "
                f"(they differ by {compared.relative:.1e}, two runs on one rank by "
                f"{compared.rounding:.1e}).",
                "Against one rank: EQUAL. ",
            )
        ]
        if compared.refused:
            lines.append(indented(f"Not compared further: {compared.refused}", "  "))
    if compared.steps or parting is not None:
        lines += [indented(sentence, "  Assumed: ") for sentence in compared.assumed]
        lines.append("  Not compared: buffers, evaluations, what the script writes.")
    return "\n".join(lines)


def _parting_lines(parting: Parting, compared: Comparison) -> list[str]:
    what = _WHAT[parting.stage].format(parting.parameter, parting.step)
    others = f" So do {parting.others} further parameters." if parting.others > 1 else ""
    others = " So does one further parameter." if parting.others == 1 else others
    verb = "differ" if parting.stage in ("start", "update") else "differs"
    sentence = (
        f"On {name_ranks(parting.ranks)}, {what} {verb} from one rank's by "
        f"{_size(parting.relative)}; rounding was measured to be {parting.rounding:.1e}.{others}"
    )
    lines = [indented(sentence, "  ")]
    if parting.place is not None:
        lines.append(_line("after" if parting.until is not None else "at", parting.place))
    if parting.until is not None:
        lines.append(_line("before", parting.until))
    lines += [indented(each, "  ") for each in parting.evidence]
    if parting.cause:
        lines.append(indented(parting.cause, "  Cause: "))
    if parting.step > 1:
        steps, were = counted(parting.step - 1, "step"), "was" if parting.step == 2 else "were"
        lines.append(f"  Before that, {steps} {were} equal but for rounding.")
    return lines


def _line(word: str, place: Place) -> str:
    text = f"    {place.text}" if place.text else ""
    return f"  {word} {place}{text}"


def _size(relative: float) -> str:
    return f"{relative:.1%}" if relative >= 1e-3 else f"{relative:.1e}"
