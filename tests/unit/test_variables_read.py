"""What a rank tells of its variables: in bounded time, and without running their code."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from ddp_notebook.model import Variable
from ddp_notebook.rank.inspect.tensor_values import TensorReader
from ddp_notebook.rank.inspect.variables import describe


def of(value: object, values: bool = True) -> Variable:
    return describe("x", value, TensorReader(values))


def test_a_tensor_is_told_by_shape_type_mean_and_its_nans() -> None:
    facts = of(torch.tensor([[1.0, 3.0], [math.nan, 5.0]])).tensor
    assert facts is not None
    assert (facts.shape, facts.dtype, facts.device) == ((2, 2), "float32", "cpu")
    assert (facts.read, facts.nans, facts.mean, facts.least, facts.most) == (4, 1, 3.0, 1.0, 5.0)
    assert facts.sample == (1.0, 3.0, None, 5.0)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.zeros(3)),
        np.arange(4.0),
        torch.tensor(2.0).expand(1),
    ],
    ids=["transposed", "bfloat16", "bool", "parameter", "numpy", "gradient of a sum"],
)
def test_values_of_any_plain_type_are_read(value: object) -> None:
    facts = of(value).tensor
    assert facts is not None and facts.read == facts.size and facts.digest


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 0, torch.qint8),
        torch.zeros(0),
        np.array(["a", 1], dtype=object),
    ],
    ids=["meta", "sparse", "quantized", "empty", "objects"],
)
def test_what_cannot_be_read_is_described_and_not_read(value: object) -> None:
    facts = of(value).tensor
    assert facts is not None and not facts.read and facts.mean is None


COMPARED: dict[str, Callable[[int], object]] = {
    "complex": lambda a: torch.tensor([1 + 2j, 3 + a * 1j]),
    "conjugate": lambda a: torch.tensor([1 + 2j, 3 + a * 1j]).conj(),
    "complex array": lambda a: np.array([a * 1j]),
    "texts": lambda a: np.array(["a", str(a)]),
    "dates": lambda a: np.array([f"2020-01-0{a}"], dtype="datetime64[D]"),
    "records": lambda a: np.array([(1, a)], dtype=[("a", "i4"), ("b", "f8")]),
    "not writable": lambda a: np.broadcast_to(np.arange(3) + a, (4, 3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", COMPARED.values(), ids=COMPARED)
def test_values_of_other_kinds_are_compared(make: Callable[[int], object]) -> None:
    one, again, other = (of(make(a)).tensor for a in (1, 1, 2))
    assert one is not None and other is not None
    assert one.read == one.size and one.digest
    assert one == again and one.digest != other.digest


def test_large_values_in_no_one_block_are_read_in_part() -> None:
    """At the same places, however the memory of a rank is laid out."""
    plain = torch.arange(4_000_000.0).reshape(2000, 2000)
    facts = of(plain.t().contiguous().t()).tensor
    assert facts is not None and 1000 < facts.read < facts.size and not facts.digest
    assert facts.sample[0] == 0.0 and facts.most is not None and facts.most > 3_900_000
    one = of(torch.ones(1).expand(10**9)).tensor
    assert one is not None and one.read and (one.mean, one.least) == (1.0, 1.0)


def test_numbers_of_numpys_are_numbers() -> None:
    for number in (np.float16(1.5), np.int8(-3), np.uint64(7), np.float32(2.5)):
        assert of(number).number == float(number)
    assert of(np.bool_(True)).text == "True"


def test_a_model_of_many_parts_is_counted_to_its_end() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(2500)])
    assert of(model).text == "Sequential, 5,000 parameters, train"


def test_a_shard_whose_memory_was_given_back_is_not_touched() -> None:
    shard = torch.ones(1000)
    shard.untyped_storage().resize_(0)
    assert of(shard).tensor.read == 0  # type: ignore[union-attr]


def test_a_rank_that_runs_has_no_tensor_read() -> None:
    assert of(torch.ones(3), values=False).tensor.read == 0  # type: ignore[union-attr]


def test_a_large_tensor_is_read_in_part() -> None:
    first = of(torch.ones(3_000_000)).tensor
    assert first is not None and 0 < first.read < first.size and not first.digest
    assert first.mean == 1.0


def test_many_tensors_cost_no_more_than_the_time_of_their_reader() -> None:
    many = [torch.ones(1_000_000)] * 150

    def cost_s(readers: Iterable[TensorReader]) -> float:
        began_s = time.thread_time()
        for tensor, reader in zip(many, readers, strict=False):
            describe("x", tensor, reader)
        return time.thread_time() - began_s

    one = min(cost_s(itertools.repeat(TensorReader())) for _ in range(3))
    assert one < 0.5 * cost_s(TensorReader() for _ in many)


class Hostile(torch.nn.Module):
    """All that a class can say for itself raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
        self.ready = True

    def __getattribute__(self, name: str) -> object:
        if "ready" in object.__getattribute__(self, "__dict__"):
            raise RuntimeError(f"{name} was read")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        raise RuntimeError("written out")


def test_a_model_is_told_without_calling_it() -> None:
    assert of(Hostile()).text == "Hostile, 4 parameters, train"
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert of(tied.eval()).text == "Sequential, 4 parameters, eval"


def test_models_differ_when_a_parameter_does() -> None:
    torch.manual_seed(0)
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert of(one).digest != of(other).digest
    other.load_state_dict(one.state_dict())
    assert of(one).digest == of(other).digest != ""


def test_an_optimizer_shows_its_learning_rates() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}], 0.1)
    assert of(optimizer).text == "SGD, lr 0.1, 0.5"


def test_numbers_have_a_value_and_all_else_a_short_text() -> None:
    assert (of(0.5).number, of(7).number, of(np.float64(0.25)).number) == (0.5, 7.0, 0.25)
    assert of(True).number is None and of(2**60).number is None and of(math.nan).number is None
    assert of([1, "a"]).text == "[1, 'a']"
