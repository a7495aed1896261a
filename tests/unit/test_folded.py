"""Long output of ranks is folded: its ends are seen, and nothing is lost."""

from __future__ import annotations

import re

from ddp_notebook.model import OutputGroup, OutputItem, OutputKind
from ddp_notebook.views import output


def group_of(rank: int, lines: int) -> OutputGroup:
    text = "".join(f"rank {rank} line {n}\n" for n in range(lines))
    return OutputGroup((rank,), (OutputItem(OutputKind.STDOUT, text),))


def test_400_lines_of_each_of_4_ranks_are_two_screens_and_all_of_them_are_in_the_page() -> None:
    groups = [group_of(rank, 400) for rank in range(4)]
    assert output.are_long(groups)
    shown = output.whole(groups)
    assert len(shown["text/plain"].splitlines()) < 100
    assert "All of it: %ddp_output --ranks 2 --tail 400" in shown["text/plain"]
    assert "rank 2 line 0\n" in shown["text/plain"] and "rank 2 line 399" in shown["text/plain"]
    for rank in range(4):
        lines = re.findall(rf"rank {rank} line (\d+)", shown["text/html"])
        assert list(map(int, lines)) == list(range(400)), "each once, in order"
    open_page = re.sub(r"<details>.*?</details>", "", shown["text/html"], flags=re.S)
    assert open_page.count(" line ") == 4 * 18


def test_short_output_and_the_long_one_of_a_few_lines_stay_as_they_are() -> None:
    assert not output.are_long([group_of(rank, 30) for rank in range(4)])
    assert not output.is_long(group_of(0, 40).items)
    assert "<details>" not in output.whole([group_of(0, 100)])["text/html"]


def test_stdout_and_stderr_in_turns_fold_as_one_text_and_figures_stay_apart() -> None:
    kinds = (OutputKind.STDOUT, OutputKind.STDERR)
    text = [OutputItem(kinds[n % 2], f"line {n}\n") for n in range(200)]
    figure = OutputItem(OutputKind.DISPLAY, data={"image/png": "aGk=", "text/plain": "a figure"})
    *_, (one,) = (pieces := list(output.pieces([*text, figure])))
    assert len(pieces) == 2 and one is figure
    assert output.is_long(pieces[0])
    shown = output.bundle((1, 2), pieces[0])
    found = [int(n) for n in re.findall(r"line (\d+)\n", shown["text/html"])]
    assert found == list(range(200))
    assert "182 more lines of ranks 1 and 2" in shown["text/html"]
