"""Every figure in README and docs is in a results file or in the code, or is marked as not measured.

A section of a page, from its heading to the next, is bound to the results that it links to, and to those that the text
directly below the headings above it links to. A link with an anchor binds to that section of the results alone.

A figure is a number with a unit, a decimal fraction, or a number with a comma for thousands; in a section bound to
results also any other of two digits and more. What is in code, in a table of options with their defaults, a year, a
version, or a section of a paper is none. A section whose heading says that its figures are not kept as results is
left out.

Defaults and limits are in the code (`code_values.py`). In a section bound to results the code vouches for sizes only:
there times, ratios and counts have to be those of the results. Any other figure (a file's size, an example) is
marked by `<!-- not measured: why -->` at the end of its paragraph, item of a list or row of a table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.code_values import code_values

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The page of commands is what their help says (test_docs.py).
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.name != "commands.md"]

NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
UNIT = (
    r"%|per cent|(?:[mµ]?s|seconds|minutes|hours|days|[kKMGT]i?B|[MG]bit/s|[MG]b/s|times|(?:samples|steps|images)/s)"
    r"(?![\w/])"
)
AND = r", | to | and | or |-"
FIGURE = re.compile(rf"(?<![\w.,/^])({NUMBER})(?![.,]?\d|[\w^])(?:(?=(?:(?:{AND})[+-]?{NUMBER})*\s?({UNIT})))?")
ALIKE = {"seconds": "s", "per cent": "%"}
NAMED = re.compile(
    r"(?i)\b(?:sections?|c?python|keras|tensorflow|mesos|highs|license) \d[\d.]*\d(?:(?: to | and )[\d.]*\d)*"
    r"|\b(?:19|20)\d\d\b"
)
"""Sections of papers, versions of software, years."""
LINK = re.compile(r"\]\((?:\.\./)*benchmarks/results/(\w+)\.md(?:#([\w-]+))?\)")
NOT_KEPT = "not kept as results"
"""What headings of sections say whose figures no results file has."""

MARK = "<!-- not measured"
"""A reason may follow: `<!-- not measured: a limit -->`."""
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True)
class Figure:
    """A figure as printed, and its unit; the unit is empty for a ratio."""

    digits: str
    unit: str

    @classmethod
    def all_in(cls, text: str) -> Iterator[Figure]:
        """All numbers of a text without code."""
        for found in FIGURE.finditer(text):
            yield cls(found[1], ALIKE.get(found[2] or "", found[2] or ""))

    def __str__(self) -> str:
        return f"{self.digits} {self.unit}".strip().replace(" %", "%")

    def is_in_code(self, *, sizes_only: bool) -> bool:
        """Whether it is a value of the code: a constant, a default, a bound."""
        amount, values = float(self.digits.replace(",", "")), code_values()
        if self.unit in BYTES:
            size = amount * BYTES[self.unit]
            return not values.isdisjoint({("B", size), ("", size)})
        if sizes_only:
            return False
        if self.unit in SECONDS:
            return ("s", round(amount * SECONDS[self.unit], 9)) in values
        if self.unit == "%":
            # 5% may be 0.05, or a reduction to 0.95, or an increase to 1.05.
            return any(("", round(part, 9)) in values for part in (amount / 100, 1 - amount / 100, 1 + amount / 100))
        return (self.unit if self.unit == "Gb/s" else "", amount) in values

    def is_in(self, results: frozenset[Figure]) -> bool:
        """Whether the results contain this figure. Cells of tables may have their unit in the heading, except %."""
        return self in results or (self.unit != "%" and Figure(self.digits, "") in results)


@dataclass(frozen=True)
class Section:
    """Of a page.

    Attributes:
        heading: its line.
        text: the heading and what follows, to the next one.
        results: the numbers of the results that it is bound to.
    """

    heading: str
    text: str
    results: frozenset[Figure]

    def has_source_of(self, figure: Figure) -> bool:
        return figure.is_in(self.results) or figure.is_in_code(sizes_only=bool(self.results))


@functools.cache
def figures_of_results(name: str, anchor: str) -> frozenset[Figure]:
    """All numbers of a results file, or of its section with that anchor."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    if anchor:
        below = {anchor_of(heading): part for heading, part in parts(text)}
        assert anchor in below, f"{name}.md has no section #{anchor}"
        text = below[anchor]
    return frozenset(Figure.all_in(text))


def parts(text: str) -> Iterator[tuple[str, str]]:
    """Each heading with the hashes before it, and all below it, headings of lower levels included."""
    marked = [*re.finditer(r"(?m)^(#+) .*$", text)]
    for place, heading in enumerate(marked):
        later = (other.start() for other in marked[place + 1 :] if len(other[1]) <= len(heading[1]))
        yield heading[0], text[heading.end() : next(later, len(text))]


def anchor_of(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def sections(page: str) -> Iterator[Section]:
    """Of a page's text."""
    assert page.startswith("# "), "a page begins with its title"
    page = re.sub(r"(?ms)^```.*?^```", "", page)
    above: dict[int, frozenset[Figure]] = {}
    for heading, whole in parts(page):
        text = re.split(r"(?m)^#+ ", whole)[0]
        level = heading.index(" ")
        above = {higher: results for higher, results in above.items() if higher < level}
        above[level] = frozenset().union(*(figures_of_results(name, anchor) for name, anchor in LINK.findall(text)))
        yield Section(heading, f"{heading}\n{text}", frozenset().union(*above.values()))


def blocks(text: str) -> list[str]:
    """The paragraphs, items of lists and rows of tables of a text."""
    return re.split(r"(?m)(?<=\n)(?=\n)|(?=^ *(?:[*-]|\d+\.) )|(?=^\|)", text)


def unmarked(text: str) -> str:
    return "".join(block for block in blocks(text) if MARK not in block)


def figures(text: str, *, is_bound: bool) -> list[Figure]:
    """What a text publishes; `is_bound`: in a section with results."""
    text = re.sub(r"(?m)(?:^\|.*\n)+", lambda table: "" if "| default |" in table[0] else table[0], text)
    # Blocks of code, code in a line, addresses of links.
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+|`[^`]*`|\]\([^)]*\)|\*\*", " ", text)
    text = re.sub(r"\s+", " ", NAMED.sub("", text))
    return [
        figure
        for figure in Figure.all_in(text)
        if figure.unit or not figure.digits.isdigit() or (is_bound and len(figure.digits) > 1)
    ]


def kept_sections(page: str) -> Iterator[Section]:
    """Those whose figures have to be kept as results."""
    return (section for section in sections(page) if NOT_KEPT not in section.heading)


def without_source(page: str) -> str:
    """What a page publishes and neither its results nor the code have, in order."""
    return "; ".join(
        str(figure)
        for section in kept_sections(page)
        for figure in figures(unmarked(section.text), is_bound=bool(section.results))
        if not section.has_source_of(figure)
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_has_a_source(page: Path) -> None:
    found = without_source(page.read_text(encoding="utf-8"))
    assert not found, f"neither in the results that the section links to nor in the code, nor marked: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_marked_has_no_source(page: Path) -> None:
    for section in kept_sections(page.read_text(encoding="utf-8")):
        for block in blocks(section.text):
            if MARK in block:
                found = figures(block, is_bound=bool(section.results))
                assert any(not section.has_source_of(figure) for figure in found), f"needs no mark: {block}"


def test_few_sections_are_without_results() -> None:
    found = [section for page in PAGES for section in sections(page.read_text(encoding="utf-8"))]
    assert [section.heading for section in found if NOT_KEPT in section.heading] == []


@pytest.mark.slow
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_changed_digit_is_noticed(is_bound: bool) -> None:
    """Most changed digits: where results or code have many figures, one of them may be the other by chance."""
    noticed, made = 0, 0
    for page in PAGES:
        for section in kept_sections(page.read_text(encoding="utf-8")):
            if bool(section.results) is is_bound:
                for figure in figures(unmarked(section.text), is_bound=is_bound):
                    for changed in with_another_digit(figure):
                        made += 1
                        noticed += not section.has_source_of(changed)
    assert noticed / made > 0.7


def with_another_digit(figure: Figure) -> Iterator[Figure]:
    for place, digit in enumerate(figure.digits):
        for other in set("0123456789") - {digit} if digit.isdigit() else ():
            yield Figure(figure.digits[:place] + other + figure.digits[place + 1 :], figure.unit)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One file of results with two sections."""
    plans = "## Of plans\n\n| machines | time, s |\n|---|---|\n| 300 | 0.53 |\n"
    trials = "## Of trials\n\n1,178 preemptions, 21%, 8 ms\n"
    (tmp_path / "speed.md").write_text(f"# Speed\n\n{plans}\n{trials}", encoding="utf-8")
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
    values = {("s", 20.0), ("B", 64 * 2.0**20), ("", 0.95), ("", 2000.0)}
    monkeypatch.setitem(globals(), "code_values", lambda: values)
    figures_of_results.cache_clear()
    yield
    figures_of_results.cache_clear()


LINKED = "[results](../benchmarks/results/speed.md)"


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"300 machines take 0.53 s, 1,178 times, 21%, 21 per cent ({LINKED}).", ""),
        (f"300 machines take 0.54 s ({LINKED}).", "0.54 s"),
        (f"310 machines take 0.53 s ({LINKED}).", "310"),
        (f"It is 22% ({LINKED}).", "22%"),
        (f"It is 21 s ({LINKED}).", "21 s"),
        (f"300% of them ({LINKED}).", "300%"),
        (f"From 0.53 to 0.55 s ({LINKED}).", "0.55 s"),
        (f"| a | 0.53 |\n| **b** | **0.55** |\n\n{LINKED}", "0.55"),
        ("It takes 0.53 s.", "0.53 s"),
        ("It takes 300 machines 0.53\ns.", "0.53 s"),
        (f"{LINKED}\n\n* a list\n\n    code 9.9 s\n\n* of 9.8 s", "9.8 s"),
        (f"{LINKED}\n\n1. a list\n    of 9.7 s", "9.7 s"),
        (f"{LINKED}\n\n### Below\n\n0.53 s", ""),
        (f"{LINKED}\n\n## Beside\n\n0.53 s", "0.53 s"),
        (f"{LINKED}\n\n### It is 9.6 s", "9.6 s"),
        ("`0.55 s`, section 3.1, Keras 3.15, in 2021\n\n```\n0.56 s\n```\n", ""),
        ("| option | default | |\n|---|---|---|\n| `--seconds` | 9.5 s | how long |\n", ""),
        (f"{LINKED[:-1]}#of-plans) 0.53 s, 8 ms", "8 ms"),
        ("### A sketch, not kept as results\n\n9.4 s", ""),
        ("The code has 20 s, 64 MiB, 5% and 2,000.", ""),
        ("The code has 21 s, 65 MiB, 6% and 2,001.", "21 s; 65 MiB; 6%; 2,001"),
        (f"There may be measured ones: 20 s, 64 MiB, 5% and 2,000 ({LINKED}).", "20 s; 5%; 2,000"),
        (f"9.3 s\n\n9.2 s\nof 9.1 s {MARK} -->\n\n9.0 s", "9.3 s; 9.0 s"),
        (f"* 9.3 s\n* 9.2 s\n  of 9.1 s {MARK} -->\n* 9.0 s", "9.3 s; 9.0 s"),
        (f"| a | b |\n|---|---|\n| 9.3 s | |\n| 9.2 s | 9.1 s {MARK}: why --> |\n| 9.0 s | |", "9.3 s; 9.0 s"),
    ],
)
def test_what_has_no_source(text: str, found: str) -> None:
    assert without_source(f"# Page\n\n## Section\n\n{text}\n") == found


@pytest.mark.usefixtures("results")
def test_a_link_to_a_section_of_results_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"speed\.md has no section #of-jobs"):
        without_source(f"# Page\n\n{LINKED[:-1]}#of-jobs)\n")
