"""What an expression gives is compared over ranks: right, small, and without the user's code."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.model import VariableTable, codec
from ddp_notebook.rank.calls import Evaluated, Expression
from ddp_notebook.rank.debugger.expressions import Expressions
from ddp_notebook.views import variable_table

MOST_BYTES = 64 << 10
PARTLY = ", not compared to its end"
SETUP = """
import torch, numpy, collections, dataclasses, datetime, decimal, enum, threading
ran = []
class Touchy:
    def __init__(self): self.kept = rank
    def __repr__(self): ran.append("repr"); return "touchy"
    __str__ = __repr__
    def __eq__(self, other): ran.append("eq"); return True
    def __hash__(self): ran.append("hash"); return 1
    def __len__(self): ran.append("len"); return 3
    def __bool__(self): ran.append("bool"); return True
    def __iter__(self): ran.append("iter"); return iter(())
    def __getattr__(self, name): ran.append("getattr " + name); raise AttributeError(name)
    def __reduce_ex__(self, n): ran.append("reduce"); return (Touchy, ())
    def __format__(self, s): ran.append("format"); return ""
    def __array__(self, *a): ran.append("array"); return numpy.zeros(3)
    def __sizeof__(self): ran.append("sizeof"); return 1
    @property
    def shape(self): ran.append("shape"); return (1,)
    @property
    def side(self): ran.append("side"); return rank
class Broken:
    def __repr__(self): raise OSError("no")
class Meta(type):
    def __repr__(cls): ran.append("meta"); return "M"
    @property
    def __name__(cls): ran.append("meta name"); return "M"
class ByMeta(metaclass=Meta): pass
class MyInt(int):
    def __repr__(self): ran.append("int repr"); return "i"
    def __eq__(self, o): ran.append("int eq"); return True
    __hash__ = int.__hash__
class MyDict(dict):
    def items(self): ran.append("items"); return ()
    def __len__(self): ran.append("dict len"); return 7
class MyTensor(torch.Tensor):
    def __repr__(self, **k): ran.append("tensor repr"); return "t"
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        ran.append("torch function")
        return super().__torch_function__(f, types, args, kwargs or {})
@dataclasses.dataclass
class Config:
    lr: float = 0.1
    seed: int = 0
    def __repr__(self): ran.append("config"); return "c"
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Shade(enum.Flag):
    LIGHT = 1
    DARK = 2
class Slots:
    __slots__ = ("a", "b")
    def __init__(self, a): self.a = a
class Tagged(list):
    def __init__(self, tag): self.tag = tag
class Failed(Exception):
    pass
class Ids(enum.IntEnum):
    ONE = 1
Point = collections.namedtuple("Point", "x y")
def on_both(): pass
def defined_twice(): return 1
first = defined_twice
def defined_twice(): return 2
defined_twice = (first, defined_twice)[rank % 2]
def closing(x):
    def inner(): return x
    return inner
partly = torch.nn.Linear(1, 1, bias=False).requires_grad_(rank == 0)
torch.nn.init.ones_(partly.weight)
frozen = torch.nn.Linear(1, 1).requires_grad_(False); torch.nn.init.ones_(frozen.weight)
torch.nn.init.zeros_(frozen.bias)
touchy, broken, by_meta = Touchy(), Broken(), ByMeta()
my_int, my_dict = MyInt(3 + rank), MyDict(a=rank)
config = Config(seed=rank)
same_config = Config()
text = "x" * 10000 + str(rank)
nested = {"a": [1, {"b": (2, [3, {"c": rank}])}], "d": {"e": None}}
same_nested = {"a": [1, {"b": (2, [3, {"c": 9}])}], "d": {"e": None}}
big = torch.zeros(300, 200); big[150, 7] = rank
nan = torch.tensor([1., float("nan")]) 
half = torch.ones(4, dtype=torch.bfloat16) * (1 + rank)
empty = torch.zeros(0, 3)
mine = torch.zeros(3).as_subclass(MyTensor)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
torch.nn.init.constant_(model[0].weight, float(rank)); torch.nn.init.zeros_(model[0].bias)
same_model = torch.nn.Linear(3, 3, bias=False); torch.nn.init.ones_(same_model.weight)
optimizer = torch.optim.SGD(same_model.parameters(), lr=0.1 * (rank + 1))
deep = []
for _ in range(500): deep = [deep]
huge = 10 ** 5000 + rank
array = numpy.arange(6.).reshape(2, 3) + rank
words = {"b", "a", "c"}
mixed = {1: "a", "b": 2.5, None: [rank]}
"""


def on_a_rank(rank: int) -> dict[str, Any]:
    names: dict[str, Any] = {"rank": rank, "__name__": "__main__"}
    exec(SETUP, names)
    names["ran"].clear()
    return names


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [on_a_rank(rank) for rank in range(3)]


def evaluated(names: dict[str, Any], source: str, *, each: bool = False) -> Evaluated:
    expressions = Expressions(
        names["rank"],
        SimpleNamespace(stopped=None, aside=contextlib.nullcontext),  # type: ignore[arg-type]
        SimpleNamespace(standing=lambda: ((), False)),  # type: ignore[arg-type]
        SimpleNamespace(get=lambda: names),  # type: ignore[arg-type]
    )
    return expressions.evaluate(Expression(source, own_text=each))


def compared(ranks: list[dict[str, Any]], source: str, *, each: bool = False) -> VariableTable:
    answers = [evaluated(names, source, each=each) for names in ranks]
    for answer in answers:
        assert answer.problem == ""
        assert len(json.dumps(codec.readable(codec.encode(answer)))) < MOST_BYTES
    found = [answer.value for answer in answers if answer.value is not None]
    return variable_table.fold(found, [], len(ranks), evaluated=True)


def cells(table: VariableTable) -> dict[tuple[int, ...], str]:
    return {cell.ranks: cell.text for s in table.sections for r in s.rows for cell in r.cells}


EQUAL = {
    "7": "7",
    "None": "None",
    "'a' * 99": "",
    "(1, 2)": "(1, 2)",
    "words": "{'a', 'b', 'c'}",
    "same_nested": "",
    "same_model": "Linear, 9 parameters, train",
    "same_config": "<Config>",
    "nan": "float32 [2] cpu, mean 1, 1 NaN",
    "empty": "float32 [0, 3] cpu",
    "broken": "<Broken>",
    "by_meta": "<ByMeta>",
    "ByMeta": "<Meta>",
    "Broken": "<class Broken>",
    "Color.BLUE": "Color.BLUE",
    "Ids.ONE": "Ids.ONE",
    "collections.Counter('abc')": "<Counter of 3>",
    "torch": "<module torch>",
    "print": "<function print>",
    "on_both": "<function on_both>",
    "frozen": "Linear, 2 parameters (2 frozen), train",
    "collections.deque([1, 2])": "<deque of 2>",
    "datetime.datetime(2026, 1, 2)": "datetime.datetime(2026, 1, 2, 0, 0)",
    "decimal.Decimal('0.1')": "Decimal('0.1')",
    "float('nan')": "nan",
}
"""With what is shown, where that is short."""
DIFFERENT = """rank * 2.5; 'a' + str(rank); text; 1j * rank; huge; [rank] * 3; nested; mixed; half
model; model.state_dict(); touchy; [touchy]; {'k': touchy}; my_int; my_dict; config; array; -rank
datetime.timedelta(rank); {'when': datetime.timedelta(rank)}; range(rank, 9); Slots(rank); big
Tagged(rank); Failed('x', rank); Exception('x', rank); collections.OrderedDict(a=rank)
Point(1, rank); list(Color)[rank:]; {'mode': (*Color, None)[rank]}; Shade(rank)
collections.deque([rank])
decimal.Decimal(rank); datetime.datetime(2026, 1, 2, rank); [collections.deque([model, rank])]"""
UNKNOWN = """deep; mine; (i for i in range(rank)); {'o': optimizer}; threading.Lock(); lambda: rank
closing(rank)"""


@pytest.mark.parametrize("source", EQUAL)
def test_equal_values_are_one(ranks: list[dict[str, Any]], source: str) -> None:
    ((of, text),) = cells(compared(ranks, source)).items()
    assert of == (0, 1, 2)
    assert text == (EQUAL[source] or text)
    assert PARTLY not in text


@pytest.mark.parametrize("source", DIFFERENT.replace("\n", "; ").split("; "))
def test_different_values_are_not(ranks: list[dict[str, Any]], source: str) -> None:
    assert cells(compared(ranks, source)).keys() == {(0,), (1,), (2,)}


def test_functions_of_one_name_and_models_that_train_otherwise_are_not_equal(
    ranks: list[dict[str, Any]],
) -> None:
    assert cells(compared(ranks, "defined_twice")).keys() == {(0, 2), (1,)}
    assert cells(compared(ranks, "partly")) == {
        (0,): "Linear, 1 parameters, train",
        (1, 2): "Linear, 1 parameters (1 frozen), train",
    }


@pytest.mark.parametrize("source", UNKNOWN.replace("\n", "; ").split("; "))
def test_what_was_not_compared_is_not_called_equal(
    ranks: list[dict[str, Any]], source: str
) -> None:
    assert all(text.endswith(PARTLY) for text in cells(compared(ranks, source)).values())


def test_nothing_of_the_users_is_run_but_what_the_expression_says() -> None:
    names = on_a_rank(1)
    values = "touchy, [touchy], {1: touchy}, by_meta, ByMeta, my_int, my_dict, mine, config, broken"
    for source in (*values.split(", "), values):
        assert evaluated(names, source).problem == ""
        assert names["ran"] == [], source
    assert "touchy" in str(evaluated(names, "touchy", each=True))
    assert names["ran"] == ["repr"]
    evaluated(names, "touchy.side")
    assert names["ran"] == ["repr", "side"]
    assert evaluated(names, "broken", each=True).problem == "raised OSError: no"
    assert evaluated(names, "touchy.nothing").problem == "raised AttributeError: nothing"
