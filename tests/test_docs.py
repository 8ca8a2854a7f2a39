"""What the documents point at is there."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import claims, tables
from benchmarks.simulation import commands
from framework.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_no_line_is_too_long_to_read(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    # A table's row cannot be wrapped.
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_tables_of_the_results_are_kept_as_values_too() -> None:
    for result in tables.RESULTS.glob("*.md"):
        kept = json.loads(result.with_suffix(".json").read_text(encoding="utf-8"))
        found = tables.tables_in(result.read_text(encoding="utf-8").splitlines())
        assert kept == json.loads(json.dumps([dataclasses.asdict(table) for table in found])), result.name


def test_every_claim_has_a_row_and_a_verdict_and_is_what_the_results_say() -> None:
    (table,) = tables.tables_in((tables.RESULTS / "claims.md").read_text(encoding="utf-8").splitlines())
    assert len(table.rows) == len(claims.CLAIMS)
    verdicts = dict(zip(table.column("claim"), table.column("verdict").values(), strict=True))
    assert {text.strip("*") for text in verdicts.values()} <= set(claims.Verdict)
    for row, claim in zip(table.rows, claims.CLAIMS, strict=True):
        assert row[table.columns.index("claim")] == claim.words
        if claim.is_read:
            found = claim.find()
            shown = tuple(row[table.columns.index(name)] for name in ("ours", "verdict", "why"))
            assert shown == (found.figure, f"**{found.verdict}**", found.reason), "run python -m benchmarks claims"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_page_of_commands_is_what_their_help_says() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "commands.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["text"](), "run python docs/commands.py"


@pytest.mark.parametrize(
    "command",
    [
        *(
            "dike run",
            "dike plan",
            "dike profile",
            "dike tune",
            "dike trials",
            "dike timeline",
            "dike plot",
            "dike clean",
        ),
        *("dike serve", "dike submit", "dike jobs", "dike agents", "dike logs", "dike outputs", "dike kill"),
        *("dike explain", "dike agents measure"),
        *("dike users add", "dike users rotate", "dike users remove", "dike users list"),
        *(f"{commands.PROGRAM} {name}" for name in commands.NAMES),
    ],
)
def test_every_option_that_the_documents_name_exists(command: str) -> None:
    is_benchmark = command.startswith(commands.PROGRAM)
    own = command.removeprefix(commands.PROGRAM if is_benchmark else "dike").split()
    shown = CliRunner().invoke(commands.app if is_benchmark else app, [*own, "--help"], env={"COLUMNS": "200"})
    helps = shown.stdout
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = {
        option
        for line in re.findall(rf"{command} (?!measure )[^\n`|]*", text)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }
    unknown = {option for option in named if option not in helps}
    # Options after the script are the script's own.
    assert unknown <= {"--steps", "--epochs", "--lr"}, unknown
