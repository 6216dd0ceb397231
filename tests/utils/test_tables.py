"""Tables say what they are given, whatever characters that holds."""

import io

import pytest
from rich.console import Console

from roi_lightning.utils.tables import markdown_table, print_table


def test_markdown_has_a_row_per_line_and_numbers_to_the_right():
    assert markdown_table(["a|b", "n"], [["x\ny", "1.5"], ["*z*", "2"]]) == (
        "| a\\|b | n |\n| --- | ---: |\n| x y | 1.5 |\n| *z* | 2 |"
    )


def test_cells_and_titles_are_no_markup():
    out = io.StringIO()
    print_table(["[b]", "n"], [["[red]x[/red]", "1"]], "[i]t", console=Console(file=out, width=60))
    assert all(text in out.getvalue() for text in ("[i]t", "[b]", "[red]x[/red]"))


def test_columns_are_aligned_and_rules_drawn():
    out = io.StringIO()
    print_table(["", ""], [["a", "1"], None, ["long", "1,000"]], console=Console(file=out, width=60))
    _, first, rule, second, _ = out.getvalue().splitlines()
    assert first == "│ a    │     1 │"
    assert second == "│ long │ 1,000 │"
    assert set(rule) <= set("├─┼┤")


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_pipe_takes_wide_tables_whole(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    print_table(["name"], [["x" * 150]])
    assert "x" * 150 in capsys.readouterr().out
