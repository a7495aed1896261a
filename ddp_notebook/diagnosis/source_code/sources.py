"""The user's files and cells: the loops and tests on the way to a collective."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from ddp_notebook import syntax
from ddp_notebook.diagnosis.source_code.conditions import (
    LOOPS,
    SCOPES,
    Test,
    called_after,
    called_on,
    enclosing,
    hold,
    holds,
    imported_in,
    last_name,
    passing_handler,
    retry_handler,
    shallow,
    targets_of,
    tests_around,
    ways_around,
    ways_out,
)
from ddp_notebook.diagnosis.source_code.names import Names, Varies
from ddp_notebook.model import Collective, Place, Ranks

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MAGIC = re.compile(r"^[^\S\n]*[%!].*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A test that decides whether a line is reached: its line, its text, how it is quoted."""

    place: Place
    test: str
    quoted: str = ""
    varies: Varies = Varies.LOCAL
    leaves: bool = False
    """True for a way around a line that leaves the loop for good."""
    decides: Varies = Varies.LOCAL
    """How likely it is why just these ranks came and the others did not."""
    names_leavers: bool = False
    """It says which ranks leave before the line: ``if rank == 1: return``."""
    handles: bool = False
    """It is an `except` that leaves before the line. The code does not say whether it did."""
    precedes: bool = False
    """It stands before the line, which who meets it does not reach: ``if rank != 0: return``."""
    wanted: bool = True
    """Whoever meets it comes to the line; False of an `else`, and of a test that leaves."""

    @property
    def line(self) -> str:
        """The line of the test, as evidence: ``train.py, line 3: if rank == 0:``."""
        return f"{self.place}: {self.place.text}"

    @property
    def on_rank(self) -> bool:
        """True when the test asks who it runs on."""
        return self.varies is Varies.BY_RANK


class Sources:
    """The user's files and cells, by the names that `Place.file` has: the run's own first.

    Where it is known in which files ranks were `seen`, only these, the run's own, cells, and what
    any of them imports: a folder may have scripts that have nothing to do with each other.
    """

    def __init__(
        self, texts: Mapping[str, str] | None = None, seen: Collection[str] | None = None
    ) -> None:
        self._texts = dict(texts or {})
        self._trees: dict[str, ast.Module | None] = {}
        self._names: dict[str, Names] = {}
        if seen is not None:
            cells = (name for name in self._texts if not name.endswith(".py"))
            used = self.imported_by({*cells, *list(self._texts)[:1], *seen})
            self._texts = {name: text for name, text in self._texts.items() if name in used}

    @property
    def texts(self) -> Mapping[str, str]:
        """The text of each file and cell that is looked at."""
        return self._texts

    def changed(self, change: Callable[[str, int], str], place: Place | None) -> str:
        """Return the change of a file that `change` makes for a line; empty where it is unknown."""
        text = self._texts.get(place.file, "") if place is not None else ""
        return change(text, place.line) if place is not None and text else ""

    def knows(self, record: Collective) -> bool:
        """True when the code of every line that leads to `record` can be read."""
        return bool(record.path) and all(self.tree(place) for place in record.path)

    def mentions(self, record: Collective, word: str) -> bool:
        """True when a file that leads to `record` has this word."""
        return any(word in self._texts.get(place.file, "") for place in record.path)

    def spells(self, *records: Collective) -> bool:
        """True when the labels stand in the code, which all ranks run: they are no one's data."""
        trees = self.known({place.file for record in records for place in record.path})
        nodes = (node for tree in trees for node in ast.walk(tree))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        return all(record.label in texts for record in records)

    def ties(self, one: str, other: str) -> Place | None:
        """Where the code makes two parameters one tensor: ``a.weight = b.weight``."""
        names = {_last_two(one), _last_two(other)}
        for file, text in self._texts.items():
            for node in [node for tree in self.known([file]) for node in ast.walk(tree)]:
                if not isinstance(node, ast.Assign):
                    continue
                sides = (ast.unparse(expression) for expression in (node.targets[0], node.value))
                if set(map(_last_two, sides)) == names:
                    return Place(file, node.lineno, "", text.splitlines()[node.lineno - 1].strip())
        return None

    def condition(
        self,
        record: Collective,
        there: Collective | None = None,
        reached: Ranks = (),
        others: Ranks = (),
    ) -> Condition | None:
        """Return the nearest test that can differ by rank, so that only some reached `record`.

        Tests around a line count, and those before it that leave the function or the loop. Not
        those that `there`, where the other ranks are, has passed too. A test of the rank is
        preferred, but not when it lets through others than the ranks that `reached` it.
        """
        # A test that the other ranks have passed as well sets nobody apart: both lines stand behind
        # it. Of the rest the heaviest counts, and of equally heavy ones the nearest, as tests come
        # from the line outwards.
        passed = set(self._tests(there)) if there is not None else set()
        tests = [test for test in self._tests(record) if test not in passed]
        did = dict.fromkeys(reached, True) | dict.fromkeys(others, False)
        weights = [self._names[place.file].decides(test, did) for place, test in tests]
        heaviest = max(weights, default=Varies.NEVER)
        if heaviest is Varies.NEVER:
            return None
        place, test = tests[weights.index(heaviest)]
        found = self._as_condition(place, test.test, test.line, test.shown)
        equals = any(isinstance(node, ast.Eq) for node in ast.walk(test.test))
        leavers = test.leaves and found.on_rank and equals
        return replace(
            found,
            decides=heaviest,
            names_leavers=leavers,
            handles=test.handles,
            precedes=test.leaves,
            wanted=test.wanted,
        )

    def any_by_rank(self, names: Collection[str]) -> bool:
        """True when a test of the rank stands before one of these functions, or what calls it."""
        names = self._with_callers(names)
        for file in self._texts:
            tree = self.tree(Place(file, 0))
            for node in ast.walk(tree) if tree else ():
                if isinstance(node, ast.Call) and (name := last_name(node.func)) in names:
                    tests = tests_around(tree or ast.Module([], []), node.lineno, name)
                    varies = (self._names[file].varies(test.test) for test in tests)
                    if max(varies, default=Varies.NEVER) is Varies.BY_RANK:
                        return True
        return False

    def _with_callers(self, names: Collection[str]) -> set[str]:
        """These functions, and those of the user's that call one of them."""
        calls = {
            own.name: {last_name(node.func) for node in ast.walk(own) if isinstance(node, ast.Call)}
            for own in self._functions()
        }
        found, before = set(names), -1
        while len(found) > before:
            before = len(found)
            found.update(name for name, called in calls.items() if called & found)
        return found

    def is_for_some(self, path: Sequence[Place], called: str) -> bool:
        """True when a test of the rank, or no known code, stands before the end of `path`."""
        record = Collective(0, 0, called, api=called, path=tuple(path))
        condition = self.condition(record)
        return not self.knows(record) or (condition is not None and condition.on_rank)

    def who_calls(
        self, names: Collection[str], files: Collection[str], ranks: Ranks
    ) -> tuple[Ranks, Place | None]:
        """Which ranks call one of these functions, and where, if one line of the files does so."""
        calls = [
            (file, node.lineno, last_name(node.func))
            for file in files
            for node in ast.walk(self.tree(Place(file, 0)) or ast.Module([], []))
            if isinstance(node, ast.Call) and last_name(node.func) in names
        ]
        if len(calls) != 1:
            return (), None
        file, line, name = calls[0]
        tests = list(tests_around(self._trees[file] or ast.Module([], []), line, name))
        lets = self._names[file].lets
        those = tuple(rank for rank in ranks if all(lets(t, rank, len(ranks)) for t in tests))
        return those, Place(file, line)

    def way_around(self, record: Collective) -> Condition | None:
        """How an iteration of the innermost loop around `record` can go without it, if it can.

        A `continue`, a `break` or an `if` in the loop, or a comprehension's filter by rank; not
        one that only asks for the loop's own variable: that is the same on all ranks. Of a loop
        around it, what leaves it; that may be a loop around the call of its function. Where none
        of these is there, a test of data in a function that the loop calls, or the `except` of a
        loop further out that passes over an error.
        """
        tests = self._tests(record)
        for place, condition in tests:
            varies = self._names[place.file].varies(condition.test)
            if condition.filters and varies is Varies.BY_RANK:
                return self._as_condition(place, condition.test, condition.line, condition.shown)
        # From the call outwards. Of the innermost loop any way around the line counts; of loops
        # further out only what ends them, since a turn that they leave out is one of all ranks'
        # turns. Loops may stand in callers: a training step is often a function of its own.
        innermost = True
        for place in reversed(record.path):
            loops = self._loops(place)
            # A lambda runs where it is called: the loop around its line need not be the next one.
            if not loops or place.function == "<lambda>":
                continue
            own = {name for loop in loops for name in targets_of(loop)}
            ways = [*ways_around(loops[0], place.line)] if innermost else []
            ways += [way for outer in loops[innermost:] for way in ways_out(outer)]
            way = next((way for way in ways if self._differs(place, way[0], own)), None)
            if way is not None:
                test, line, leaves = way
                return replace(self._as_condition(place, test, line), leaves=leaves)
            innermost = False
        if innermost:
            return None
        # Only functions below the loop: a test before it is passed once, and is the same for all
        # turns.
        inside = itertools.takewhile(lambda place: not self._loops(place), reversed(record.path))
        functions = {(place.file, place.function) for place in inside}
        for place, condition in tests:
            here = (place.file, place.function) in functions and _asks_data(condition.test)
            if here and self._differs(place, condition.test, set()):
                return self._as_condition(place, condition.test, condition.line, condition.shown)
        for place in record.path:
            for loop in self._loops(place):
                handler = passing_handler(loop, place.line)
                if handler is not None:
                    return self._as_condition(place, ast.Constant(True), handler.lineno)
        return None

    def known(self, files: Collection[str] | None = None) -> list[ast.Module]:
        """The code of these files, by default of all, as far as it parses."""
        trees = (self.tree(Place(file, 0)) for file in (self._texts if files is None else files))
        return [tree for tree in trees if tree is not None]

    def imported_by(self, files: Collection[str]) -> set[str]:
        """These files, and what they import, as far as it is known."""
        modules = {PurePath(file).stem: file for file in self._texts}
        found, waiting = set(files) & set(self._texts), [*files]
        while waiting:
            names = {name for tree in self.known([waiting.pop()]) for name in imported_in(tree)}
            new = {modules[name] for name in names & set(modules)} - found
            found |= new
            waiting += new
        return found

    def tries_again(self, record: Collective) -> Condition | None:
        """The `except` after which `record` is called again, if that alone can set ranks apart.

        The loops around it make as many turns on every rank, and nothing leaves them.
        """
        again: Condition | None = None
        for place in record.path:
            for loop in reversed(self._loops(place)):
                handler = retry_handler(loop, place.line)
                if handler is not None:
                    again = self._as_condition(place, ast.Constant(True), handler.lineno)
                    continue
                turns = _counts(loop)
                varies = self._names[place.file].varies
                if turns is None or any(varies(bound) > Varies.CONFIGURED for bound in turns.args):
                    return None
                ways = [*ways_around(loop, place.line), *ways_out(loop)]
                if any(self._differs(place, way[0], targets_of(loop)) for way in ways):
                    return None
        return again

    def by_optimizer(self, record: Collective) -> Condition | None:
        """The ``optimizer.step(closure)`` that calls the function with `record`, however often."""
        for place, below in itertools.pairwise(record.path):
            for call in self._expressions(place):
                if not isinstance(call, ast.Call) or last_name(call.func) != "step":
                    continue
                if below.function in map(last_name, call.args):
                    return self._as_condition(place, ast.Constant(True), place.line)
        return None

    def counted_loop(self, record: Collective) -> Place | None:
        """The line of the loop around `record` that goes over no batches, but counts to a bound.

        Only of a bound that may differ between ranks: ``range(state["step"], n)``.
        """
        for place in reversed(record.path):
            loop = self._loop(place)
            if loop is not None:
                turns = _counts(loop)
                bound = self._as_condition(place, turns, loop.lineno) if turns is not None else None
                return bound.place if bound and bound.varies > Varies.CONFIGURED else None
        return None

    def loop_around(self, path: Sequence[Place]) -> tuple[Place, ...]:
        """The way to the head of the innermost loop around the end of `path`; empty without one."""
        for index in reversed(range(len(path))):
            loop = self._loop(path[index])
            if loop is not None:
                return (*path[:index], self._line(path[index], loop.lineno))
        return ()

    def made_by_rank(self, place: Place) -> tuple[str, Place] | None:
        """The variable of a line that got its value by the rank, and where; None for none."""
        nodes = [node for expression in self._expressions(place) for node in ast.walk(expression)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in ast.walk(self.tree(place) or ast.Module([], [])):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                    by_rank = self._names[place.file].varies(value) is Varies.BY_RANK
                    if by_rank and node.lineno < place.line and ast.unparse(value) != "rank":
                        return name, self._line(place, node.lineno)
        return None

    def in_a_loop(self, record: Collective) -> bool | None:
        """True when some line that leads to `record` stands in a loop; None where unknown."""
        if not self.knows(record):
            return None
        return any(self._loop(place) is not None for place in record.path)

    def in_one_loop(self, one: Collective, other: Collective) -> bool | None:
        """True when one loop holds both lines, False when `one` is past the loop of `other`.

        That loop may be in a function that was called before `one`. None when there is no such
        loop, or the code is not known.
        """
        mine, theirs = _parting(one, other)
        if mine is None or theirs is None or mine.file != theirs.file:
            return None
        loop = self._loop(theirs)
        if loop is not None and not holds(loop, mine.line):
            return False
        below = other.path[other.path.index(theirs) + 1 :]
        called = below[0].function if below else other.api.rpartition(".")[2]
        # A comprehension repeats it too, where the line does not call it outside of that as well.
        at_line = self._expressions(theirs)
        repeats = [node for node in at_line if isinstance(node, _COMPREHENSIONS)]
        inside = {id(child) for node in repeats for child in ast.walk(node)}
        calls = [n for n in at_line if isinstance(n, ast.Call) and last_name(n.func) == called]
        in_loop = bool(repeats) and inside.issuperset(map(id, calls))
        if mine.line > theirs.line and (in_loop or any(map(self._loop, below))):
            return None if self.alternatives(one, other) else False
        return None if loop is None else True

    def in_one_turn(self, before: Collective, after: Collective) -> bool:
        """True when `after` stands behind `before` in the body of the innermost loop around it.

        A rank that called `before` last has begun the turn in which `after` comes.
        """
        mine, theirs = _parting(before, after)
        if mine is None or theirs is None or mine.file != theirs.file or mine.line >= theirs.line:
            return False
        loop = self._loop(theirs)
        below = after.path[after.path.index(theirs) + 1 :]
        return loop is not None and holds(loop, mine.line) and not any(map(self._loop, below))

    def stands_behind(self, one: Collective, other: Collective) -> bool:
        """True when `one` stands behind the loop of `other`: both ranks have left that loop."""
        mine, theirs = _parting(one, other)
        if mine is None or theirs is None or mine.line <= theirs.line:
            return False
        return self.in_one_loop(one, other) is False

    def alternatives(self, one: Collective, other: Collective) -> bool:
        """True when the two lines stand in the two branches of one `if`."""
        return self._branches(one, other) is not None

    def swapped(self, one: Collective, other: Collective) -> bool:
        """True when both branches of one `if` make both calls, each the other's first.

        Or both of two functions that are called at one line do.
        """
        mine, theirs = _parting(one, other)
        if mine is None or theirs is None:
            return False
        branches = self._branches(one, other) or self._two_functions(mine, theirs)
        if branches is None:
            return False
        later_mine = called_after(branches[0], mine.line)
        later_theirs = called_after(branches[1], theirs.line)
        names = [{record.operation, record.api} for record in (one, other)]
        return bool(later_mine & names[1]) and bool(later_theirs & names[0])

    def call_of_both(self, one: Collective, other: Collective) -> Place | None:
        """The line of a loop that calls one function here and another there, by one expression.

        Such as ``metric.compute()``, of objects of two classes: each rank's loop is at another.
        """
        mine, theirs = _parting(one, other)
        if mine is None or theirs is None or self._two_functions(mine, theirs) is None:
            return None
        above = one.path[: one.path.index(mine)]
        if not above or not any(self._loop(place) is not None for place in above):
            return None
        spelled = [each.function in above[-1].text for each in (mine, theirs)]
        return above[-1] if mine.function == theirs.function or not any(spelled) else None

    def answered(self, record: Collective, condition: Condition) -> bool:
        """True when ranks that the condition keeps away may call the same in their own branch.

        That is so where that branch calls what the line calls, or any function of the user's.
        """
        tree = self.tree(condition.place)
        lines = [place.line for place in record.path if place.file == condition.place.file]
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.If) and node.lineno == condition.place.line:
                inside = any(hold(node.body, line) for line in lines)
                others = node.orelse if inside else node.body
                own = {function.name for function in self._functions()}
                own |= {record.operation, record.api.rpartition(".")[2], *called_on(tree, lines)}
                return bool(own & called_after(others, 0))
        return True

    def _functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        nodes = (node for tree in self.known() for node in ast.walk(tree))
        return [node for node in nodes if isinstance(node, _FUNCTIONS)]

    def _branches(
        self, one: Collective, other: Collective
    ) -> tuple[list[ast.stmt], list[ast.stmt]] | None:
        mine, theirs = _parting(one, other)
        if mine is None or theirs is None or mine.file != theirs.file:
            return None
        for node in ast.walk(self.tree(mine) or ast.Module([], [])):
            if isinstance(node, ast.If):
                for a, b in ((node.body, node.orelse), (node.orelse, node.body)):
                    if hold(a, mine.line) and hold(b, theirs.line):
                        return a, b
        return None

    def _two_functions(
        self, mine: Place, theirs: Place
    ) -> tuple[list[ast.stmt], list[ast.stmt]] | None:
        """The bodies of the functions around two lines, if these are two."""
        one, other = (
            next((node for node in reversed(self._around(place)) if isinstance(node, SCOPES)), None)
            for place in (mine, theirs)
        )
        if one is other or not isinstance(one, _FUNCTIONS) or not isinstance(other, _FUNCTIONS):
            return None
        return one.body, other.body

    def branch_of(self, place: Place) -> str:
        """The innermost `if` around a line in its function, as text; empty without one."""
        around = [node for node in self._around(place) if isinstance(node, (ast.If, *SCOPES))]
        test = getattr(around[-1], "test", None) if around else None
        text = ast.unparse(test) if test is not None else ""
        return f"if {text}" if text and "__name__" not in text else ""

    def tree(self, place: Place) -> ast.Module | None:
        """The code of the file of a line; None where it is not known, or does not parse."""
        name = place.file
        if name not in self._trees:
            tree = None
            if name in self._texts:
                try:
                    tree = shallow(syntax.parse(MAGIC.sub("", self._texts[name])))
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    tree = None
            # Both at once: whoever got a test or a loop from the tree may take the file's `Names`
            # unasked.
            self._trees[name], self._names[name] = tree, Names(tree)
        return self._trees[name]

    def _expressions(self, place: Place) -> list[ast.expr]:
        return [
            node
            for node in ast.walk(self.tree(place) or ast.Module([], []))
            if isinstance(node, ast.expr) and holds(node, place.line)
        ]

    def _loop(self, place: Place) -> ast.For | ast.AsyncFor | ast.While | None:
        """The innermost loop around a line, in the line's own function."""
        return next(iter(self._loops(place)), None)

    def _loops(self, place: Place) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops around a line in its own function, the innermost first."""
        found: list[ast.For | ast.AsyncFor | ast.While] = []
        for node in self._around(place):
            if isinstance(node, SCOPES):
                found = []
            elif isinstance(node, LOOPS):
                found.insert(0, node)
        return found

    def _around(self, place: Place) -> list[ast.stmt]:
        tree = self.tree(place)
        return list(enclosing(tree.body, place.line)) if tree else []

    def _tests(self, record: Collective) -> list[tuple[Place, Test]]:
        """The tests on the way to a record, the nearest first."""
        if not record.path:
            return []  # it is of a thread that none of the user's lines are on
        calls = [*(place.function for place in record.path[1:]), record.api.rpartition(".")[2]]
        found = []
        for place, called in reversed(list(zip(record.path, calls, strict=True))):
            tree = self.tree(place)
            if tree is not None:
                tests = tests_around(tree, place.line, called, place.function)
                found += [(Place(place.file, 0, place.function), test) for test in tests]
        return found

    def _as_condition(self, place: Place, test: ast.expr, line: int, shown: str = "") -> Condition:
        varies, where = self._names[place.file].varies(test), self._line(place, line)
        return Condition(where, ast.unparse(test), shown or where.text, varies)

    def _line(self, place: Place, line: int) -> Place:
        """Another line of the function that `place` is in."""
        lines = self._texts[place.file].splitlines()
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return Place(place.file, line, place.function, text)

    def _differs(self, place: Place, test: ast.expr, same: set[str]) -> bool:
        """True of a test that may differ between ranks; `same` are variables that do not."""
        nodes = list(ast.walk(test))
        varies = self._names[place.file].varies(test)
        if varies in (Varies.NEVER, Varies.BY_RANK):
            return bool(varies)
        if any(isinstance(node, ast.Call) or getattr(node, "attr", "") == "grad" for node in nodes):
            return True  # whether a parameter got a gradient is each rank's own
        # A name may stand for anything, so it may differ. Not a loop's own variable, which is alike
        # in the same turn; and not what is spelled as a constant.
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return not all(name in same or name.isupper() for name in names)


def _counts(loop: ast.For | ast.AsyncFor | ast.While) -> ast.Call | None:
    """The ``range(...)`` that a loop goes over."""
    turns = loop.iter if isinstance(loop, ast.For) else None
    return turns if isinstance(turns, ast.Call) and last_name(turns.func) == "range" else None


def _asks_data(test: ast.expr) -> bool:
    """True of a comparison or a call; that something is there, or is on, is set for all ranks.

    So is every how many steps something is done.
    """
    nodes = list(ast.walk(test))
    if any(isinstance(node, ast.Mod) for node in nodes):
        return False
    calls = (node for node in nodes if isinstance(node, ast.Call))
    comparisons = (node for node in nodes if isinstance(node, ast.Compare))
    return any(last_name(call.func) not in _ASK_KIND for call in calls) or any(
        not isinstance(each.ops[0], (ast.Is, ast.IsNot)) for each in comparisons
    )


_ASK_KIND = ("callable", "getattr", "hasattr", "isinstance", "issubclass")


def _parting(one: Collective, other: Collective) -> tuple[Place | None, Place | None]:
    """The lines in the frame at which two paths part: the last that both share, or the first."""
    for mine, theirs in zip(one.path, other.path, strict=False):
        if (mine.file, mine.line) != (theirs.file, theirs.line):
            return mine, theirs
    return None, None


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])
