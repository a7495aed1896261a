"""A tensor in a few bytes, to be compared with other ranks' without sending it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A digest of a tensor. `hash` is of its bytes in order, "" if it was not computed.

    `norm` is its 2-norm and `sample` a few of its values, evenly spread. None in them means values
    that are not finite; `finite` is then False.
    """

    name: str
    numel: int
    hash: str = ""
    norm: float | None = None
    sample: tuple[float | None, ...] = ()
    finite: bool = True
