"""What tasks print reaches the user's terminal in whole lines."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from framework.cli import task_output
from framework.cli.task_output import TaskOutput
from solver.cli.output import console, new_table, say
from tests.waiting import wait_until


class FakeTerminal(io.StringIO):
    """Standard output and standard error as one."""


def output(rewrite: dict[str, str] | None = None) -> tuple[TaskOutput, FakeTerminal]:
    terminal = FakeTerminal()

    def rewritten(line: str) -> str:
        for old, new in (rewrite or {}).items():
            line = line.replace(old, new)
        return line

    return TaskOutput({"stdout": terminal, "stderr": terminal}, rewritten), terminal


def test_a_line_is_held_back_until_its_end_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_output, "LINE_END_TIMEOUT_S", 600.0)
    out, terminal = output()
    out.write("chief", "stdout", "fold 1 ")
    out.end_line()
    terminal.write("dike: checkpoint of step 3\n")
    out.write("chief", "stdout", "accuracy 0.9\nfold 2")
    assert terminal.getvalue() == "dike: checkpoint of step 3\nfold 1 accuracy 0.9\n"
    out.finish()
    assert terminal.getvalue().endswith("\nfold 2\n")


@pytest.mark.slow
def test_the_beginning_of_a_line_is_seen_if_its_end_does_not_come() -> None:
    out, terminal = output()
    out.write("chief", "stdout", "...")
    wait_until(lambda: terminal.getvalue() == "...", "the dots")
    out.end_line()
    terminal.write("dike: worker:0 ended\n")
    out.write("chief", "stdout", ".\n")
    assert terminal.getvalue() == "...\ndike: worker:0 ended\n.\n"


def test_progress_bars_are_seen_as_they_grow_and_end_before_another_line() -> None:
    out, terminal = output()
    out.write("chief", "stdout", "1/3 =\r2/3 ==\r")
    assert terminal.getvalue() == "1/3 =\r2/3 ==\r"
    out.end_line()
    terminal.write("dike: worker:0 ended\n")
    out.write("chief", "stdout", "3/3 ===\n")
    assert terminal.getvalue() == "1/3 =\r2/3 ==\r\ndike: worker:0 ended\n3/3 ===\n"


def test_tracebacks_name_the_user_s_files_and_noise_is_left_out() -> None:
    out, terminal = output({"/sandbox/bundle": "/projects/mine"})
    out.write("chief", "stderr", '  File "/sandbox/bun')
    out.write("chief", "stderr", 'dle/train.py", line 3\n')
    out.write("chief", "stderr", "I0000 00:00:1795362665.901705   25433 cudart_stub.cc:31] Could not find cuda\n")
    out.write("chief", "stderr", "2026-11-22 15:15:37.123456: I external/xla/tsl/util/port.cc:153] oneDNN is on\n")
    assert terminal.getvalue() == '  File "/projects/mine/train.py", line 3\n'


def test_lines_of_several_tasks_are_labelled() -> None:
    out, terminal = output()
    out.write("w0", "stdout", "a", "[worker:0] ")
    out.write("w1", "stdout", "b\n", "[worker:1] ")
    out.write("w0", "stdout", "c\n", "[worker:0] ")
    assert terminal.getvalue() == "[worker:1] b\n[worker:0] ac\n"


WRITTEN = "\x1b[31mred\x1b[0m 1/2\r2/2\x1b]0;title\x07\x1b[2J\x9b1A \u202e\n"


def test_a_terminal_gets_colours_and_nothing_that_takes_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    out, terminal = output()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    out.write("chief", "stdout", WRITTEN)
    out.write("chief", "stderr", "\x1b[8mhidden\x1bc")
    out.finish()
    assert terminal.getvalue() == (
        "\x1b[31mred\x1b[0m 1/2\r2/2\\x1b]0;title\\x07\\x1b[2J\\x9b1A \\u202e\n\x1b[8mhidden\\x1bc\n"
    )


def test_a_pipe_gets_what_was_written() -> None:
    out, pipe = output()
    out.write("chief", "stdout", WRITTEN)
    assert pipe.getvalue() == WRITTEN


def test_tables_show_what_others_wrote_and_obey_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("Jobs", "job")
    table.add_row("mine\x1b[2J")
    table.add_row(Text("theirs\x1b]0;title\x07"))
    out = console()
    out.print(table)
    say(out, "said\x1b[A")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for text in (r"mine\x1b[2J", r"theirs\x1b]0;title", r"said\x1b[A"):
        assert text in shown
