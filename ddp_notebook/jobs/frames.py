"""Stack frames of torch's dumps and of tracebacks, as lines of the user's code.

Lines are read from the user's own files where these are still there and no newer than the dump.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.model import Part, Place

_LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/lib64/python3",
    "/torch/",
    f"{Path(__file__).parents[1]}/",
)
_API_OF_DDP = {
    "__init__": ("DistributedDataParallel.__init__", Part.CONSTRUCTOR),
    "_pre_forward": ("forward", Part.FORWARD),
    "forward": ("forward", Part.FORWARD),
}
_WRAPPERS = ("wrapper", "_call_impl", "_wrapped_call_impl", "decorate_context")


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack: the whole name of its file, the line, the function."""

    file: str
    line: int
    function: str

    @property
    def users(self) -> bool:
        """True of code that is neither Python's, nor torch's, nor another library's."""
        return not self.file.startswith("<") and not any(name in self.file for name in _LIBRARIES)


def function_called(frames: Sequence[Frame]) -> tuple[str, Part | None]:
    """Return the function of torch that the user's code called, and the part of DDP that did.

    `frames` has the innermost first. Empty and None where torch's frames do not tell.
    """
    api, part = "", None
    # From the innermost outwards: the last function of torch before the user's line is the one that
    # was called.
    for frame in frames:
        if frame.users:
            return api, part
        if frame.file.endswith("torch/nn/parallel/distributed.py"):
            api, part = _API_OF_DDP.get(frame.function, (api, part))
        elif frame.function == "backward" and frame.file.endswith(
            ("torch/_tensor.py", "torch/autograd/__init__.py")
        ):
            api, part = "backward", Part.BACKWARD
        elif (
            part is None
            and frame.file.endswith("torch/distributed/distributed_c10d.py")
            and frame.function not in _WRAPPERS
            and not frame.function.startswith("_")
        ):
            api = frame.function
    return api, part


@dataclass
class Sources:
    """The user's files that stacks name, by the names under which they are shown.

    Two files of one name are shown with their folders. A file that is newer than `before_s` (since
    1970) is not what ran, and is not read.
    """

    before_s: float | None = None
    texts: dict[str, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, list[str]] = field(default_factory=dict)
    _places: dict[Frame, Place] = field(default_factory=dict)

    def path(self, frames: Iterable[Frame]) -> tuple[Place, ...]:
        """Return the user's lines of a stack that has the innermost frame first, reversed."""
        return tuple(self.place(frame) for frame in frames if frame.users)[::-1]

    def place(self, frame: Frame) -> Place:
        """Return the line of a frame; the same object for equal frames.

        A dump of a few kilobytes may name one stack of hundreds of frames in each of 50,000
        entries: what is built must not be larger than what was read.
        """
        if frame in self._places:
            return self._places[frame]
        if frame.file not in self._names:
            path = Path(frame.file)
            name = path.name if path.name not in self._names.values() else frame.file
            self._names[frame.file] = name
            # A dump may name as many files as it likes, and each is opened.
            code = path.suffix == ".py" and len(self._names) <= 200
            if code and (source := files.source(path, self.before_s)):
                self.texts[name], self._lines[name] = source, source.splitlines()
        name = self._names[frame.file]
        lines = self._lines.get(name, [])
        text = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
        function = "" if frame.function in ("<module>", "??") else frame.function
        self._places[frame] = Place(name, frame.line, function, text)
        return self._places[frame]
