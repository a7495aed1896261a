"""Sends a rank's variables to the notebook."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from ddp_notebook.rank import gpu
from ddp_notebook.rank.calls import PickledValue, VariableToSend


def get(request: VariableToSend, names: Mapping[str, Any]) -> PickledValue:
    """The value of a variable, or why it cannot be sent.

    Tensors that become NumPy arrays (bfloat16 as float32) do so inside lists, tuples and dicts
    too: the notebook kernel need not have torch loaded.
    """
    if request.name not in names:
        return PickledValue(error="there is no such variable")
    value = names[request.name]
    try:
        return PickledValue(pickle.dumps(_sendable(value, request.keep_tensors)))
    except Exception as error:  # noqa: BLE001  # its own code may raise anything
        return PickledValue(error=f"a {type(value).__name__} cannot be sent: {error}")


def _sendable(value: Any, keep_tensors: bool) -> Any:
    if isinstance(value, torch.Tensor):
        _need(gpu.is_readable(value))
        tensor = value.detach().cpu()
        if keep_tensors:
            return tensor
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return {key: _sendable(each, keep_tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_sendable(each, keep_tensors) for each in value)
    # It may hold tensors, which are pickled with it.
    _need(type(value) in (int, float, bool, str, bytes, type(None)) or not gpu.is_working())
    return value


def _need(readable: bool) -> None:
    """Raise StillWorking where a value cannot be read without a wait for the GPU."""
    if not readable:
        raise gpu.StillWorking(
            "its GPU is still working, and reading a value would wait for it. If it hangs, "
            "%ddp_abort frees the rank"
        )
