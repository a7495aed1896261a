"""Asks what this rank's GPU does, without ever waiting for it.

A collective of NCCL's returns at once, and so does every kernel: where one hangs, the thread that
next reads a value from the GPU hangs too, in NVIDIA's driver. Whatever of ours looks at a GPU asks
here first, and nothing else of ours asks CUDA while the user's code runs.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dis
import linecache
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ddp_notebook import syntax
from ddp_notebook.rank import torch_private

_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC, of cuda.h."""
_READING = frozenset(
    (
        *("item", "tolist", "cpu", "numpy", "to", "copy_", "synchronize", "wait", "nonzero"),
        *("any", "all", "equal", "allclose", "unique", "masked_select", "float", "int", "bool"),
    )
)
"""Torch's names of calls that wait for a GPU in C, where Python has no frame."""
_TESTING = ("TO_BOOL", "POP_JUMP", "UNARY_NOT", "JUMP_IF", "BINARY_SUBSCR", "STORE_SUBSCR")
"""How the instructions begin that do so without a call: ``if loss > 3``, ``x[mask]``."""
_COMPUTING = ("BINARY_OP", "COMPARE_OP", "UNARY_")
"""How those begin that compute without a call: ``x @ w``."""


class StillWorking(RuntimeError):
    """The GPU hangs in, or still works on, what an earlier cell has issued."""


def in_use() -> bool:
    """Return whether this process uses a GPU: to ask more would begin it."""
    return torch_private.uses_cuda()


def sleep_in_waits() -> None:
    """Have threads of this process that wait for a GPU sleep, from now on.

    By default they spin, and one that spins looks like one that computes, and takes a core from
    the ranks that compute. Measured on an H200: a thread in ``.item()`` is runnable at every look
    without this, and asleep at every look with it.
    """

    def set_flags() -> None:
        # By the driver's interface, for each GPU that is visible: CUDA's other one sets it for the
        # current GPU only, and makes a context there, which takes 500 MB.
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1")
            for number in range(torch.cuda.device_count()):
                device = ctypes.c_int()
                if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
                    driver.cuDevicePrimaryCtxSetFlags_v2(device, _BLOCKING_SYNC)

    torch_private.when_cuda_begins(set_flags)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the values of `tensor` can be read without waiting for what was issued before.

    Always true of a CPU's; never while a CUDA graph is captured, which a question would void. From
    any thread.
    """
    if not tensor.is_cuda:
        return True
    if torch_private.is_capturing():
        return False
    try:
        # It is read on the current stream, which the user may have set; most work is on the other.
        streams = torch.cuda.current_stream(tensor.device), torch.cuda.default_stream(tensor.device)
        return all(stream.query() for stream in streams)
    except RuntimeError:  # the process can use its GPU no more, as after a device-side assert
        return False


def is_working() -> bool:
    """Return whether the GPU is not done with what this thread issued; for the thread that did."""
    if not in_use() or torch_private.is_capturing():
        return False
    try:
        return not torch.cuda.current_stream().query()
    except RuntimeError:  # the user's own next call raises it
        return False


def await_work(waits: Callable[[bool], None]) -> None:
    """Wait until the GPU is done with what this thread issued, interruptible at any time.

    `waits` is called as it begins, and as it has ended; never where there is nothing to wait for.
    """
    if not is_working():
        return
    waits(True)
    try:
        while is_working():
            time.sleep(0.001)
    finally:
        waits(False)


def may_wait_in(frame: FrameType) -> bool:
    """Return whether what this innermost frame calls in C waits for the GPU.

    Python of torch's own calls nothing else that takes long; a line of the user's is known by the
    name that it calls, or by a tensor of a GPU that it computes with: a GPU takes about a thousand
    launches in advance, and whoever issues one more behind a hang waits, too. Only meaningful of a
    thread that has stayed where it is.
    """
    if str(frame.f_globals.get("__name__", "")).startswith("torch."):
        return True
    at, instructions = frame.f_lasti, dis.get_instructions(frame.f_code)
    instruction = next((each for each in instructions if each.offset == at), None)
    if instruction is None:
        return False
    if instruction.opname.startswith(_TESTING):
        return True
    if not instruction.opname.startswith(("CALL", *_COMPUTING)):
        return False
    parsed = _parsed(frame, instruction)
    func = getattr(getattr(parsed, "value", None), "func", None)
    # The last name of what is called: "item" of ``loss.item()``.
    reads = (getattr(func, "attr", "") or getattr(func, "id", "")) in _READING
    names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    values = (frame.f_locals.get(name, frame.f_globals.get(name)) for name in names)
    return reads or any(map(is_on_gpu, values))


def _parsed(frame: FrameType, instruction: dis.Instruction) -> ast.AST:
    """Return the statement or expression of an instruction; an empty one where it is not known."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    positions: Any = instruction.positions
    try:
        text = ast.get_source_segment("".join(lines), positions) or ""
        # In parentheses it may be of several lines; ``y += x`` is no expression.
        changes = instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
        parsed: Any = syntax.parse(text if changes else f"({text})")
        return parsed.body[0]  # type: ignore[no-any-return]
    except (SyntaxError, ValueError, TypeError, AttributeError, IndexError):
        return ast.Pass()


def is_on_gpu(value: object) -> bool:
    """Return whether a value is a tensor of a GPU; of subclasses, which may be anything, False."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and bool(value.is_cuda)  # type: ignore[attr-defined]
