"""Sends a rank's variables to the notebook."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

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
        value = _to_cpu(value) if request.keep_tensors else _to_numpy(value)
        return PickledValue(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001  # its own code may raise anything
        return PickledValue(error=f"a {type(value).__name__} cannot be sent: {error}")


def _to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return _inside(value, _to_numpy)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return _inside(value, _to_cpu)


def _inside(value: Any, convert: Any) -> Any:
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return {key: convert(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(convert(each) for each in value)
    return value
