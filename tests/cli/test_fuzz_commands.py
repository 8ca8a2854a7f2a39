"""Command lines made up from the commands' own options: each ends by itself, with a sentence if it was refused."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.main import get_command

from framework import cli
from tests.properties import examples

pytestmark = pytest.mark.integration

LEFT_OUT = {"serve", "mesos", "cluster", "clean", "users"}
"""Commands that run forever if they accept their arguments, or that change files outside the test's folder."""
FILES = ("cluster.yaml", "empty", "binary", "list.json", "deep.json", "folder", "absent", "absent.py")
ODD = ("", "-", "--", "x", "\udcff", "\x1b[2J", "../..", "/dev/null", "[]", "{}", "a:b:c", "1:0", "GPU", "0")
NUMBERS = ("-1", "0", "1", "1.5", "1e308", "nan", "inf", "99999999999999999999", "1e-320", "0x10", "\u0664")


def commands() -> dict[str, list[Any]]:
    """Name -> what it takes, for those that are tried."""
    group: Any = get_command(cli.app)
    found = {}
    for name in sorted(set(group.commands) - LEFT_OUT):
        context = group.commands[name].make_context(name, [], resilient_parsing=True)
        found[name] = [one for one in context.command.params if "--help" not in one.opts]
    return found


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    (made / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"name": "a", "cpus": 4, "mem": 8}]}))
    (made / "empty").touch()
    (made / "binary").write_bytes(bytes(range(256)))
    (made / "list.json").write_text("[1, 2]")
    (made / "deep.json").write_text("[" * 100_000)
    (made / "folder").mkdir()
    return made


def lines(known: dict[str, list[Any]]) -> st.SearchStrategy[list[str]]:
    values = st.one_of(st.sampled_from([*FILES, *ODD, *NUMBERS]), st.text(max_size=8))

    @st.composite
    def line(draw: st.DrawFn) -> list[str]:
        name = draw(st.sampled_from(sorted(known)))
        words = [name]
        for one in draw(st.lists(st.sampled_from(known[name]), max_size=4, unique=True)):
            if is_option(one):
                words.append(draw(st.sampled_from([*one.opts, *one.secondary_opts])))
            if not getattr(one, "is_flag", False):
                words.append(draw(values))
        # Nothing is trained here: none of the files is a script.
        return words + draw(st.lists(st.one_of(values, st.just("--help")), max_size=2))

    return line()


def test_a_command_line_is_obeyed_or_refused_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DIKE_SERVICE", "http://127.0.0.1:1")
    monkeypatch.setenv("DIKE_MASTER", "127.0.0.1:1")
    monkeypatch.setenv("DIKE_STORAGE", f"sqlite:///{folder}/none.db")
    codes: set[Any] = set()

    @examples(250, suppress_health_check=list(HealthCheck))
    @given(lines(commands()))
    def tried(line: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "argv", ["dike", *(word.replace("\0", "") for word in line)])
            code: Any = 0
            try:
                cli._report_errors(cli._dike)
            except SystemExit as end:  # An exception of any other kind would be a traceback.
                code = end.code or 0
        codes.add(code)
        assert code in (0, 1, 2), line
        assert err.getvalue().strip() or not code, line

    tried()
    assert {0, 2} <= codes
