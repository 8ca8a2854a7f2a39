"""Every figure that README and docs publish stands in a results file, or is listed here as one that nobody measured.

A section of a page, from its heading to the next, is bound to the results that it links to, and to those that the text
directly below the headings above it links to. A link with an anchor binds to that section of the results alone.

A figure is a number with a unit, a decimal fraction, or a number with a comma for thousands; in a section bound to
results also any other of two digits and more. What is in code, in a table of options with their defaults, a year, a
version, or a section of a paper is none. A section whose heading says that its figures are not kept as results is
left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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

NOT_MEASURED = {
    "README.md": "27 MB",
    "api.md": "50 MiB; 20,000; 4 MiB; 64 KiB; 64 KiB; 30 s; 10 minutes",
    "architecture.md": "0.6 s; 5 s; 5 s",
    "elastic.md": "5%; 10 s; 120 s",
    "files.md": "50 MiB; 20,000; 1 GiB; 30 days; 3 s; 15 s; 2,000; 1,000; 64 MiB",
    "limits.md": "50 MiB",
    "planner.md": "2,000; 0.8; 1%; 1%; 300,000; 1%; 300; 100%; 512 MiB; 3 GiB",
    "policies.md": "3%; 40; 15%; 1.3 times; 1.3; 12; 16",
    "python.md": "1 MiB; 50 MiB",
    "searches.md": "512 KiB; 64 MiB",
    "security.md": "10,000; 256 KiB; 4 MiB; 50 MiB; 200 MiB; 20,000; 8 MiB; 100,000",
    "service.md": "10 Gb/s; 30 days; 15 s",
    "suspend-resume.md": "90%; 5%; 570; 16 MiB; 64 MiB",
    "training-jobs.md": "1%; 20 s; 5 s",
}
"""Of each page what no benchmark has measured, in order: defaults, limits and constants of the code, sizes of files,
goals, what a test holds, cases of an example. A figure that somebody has measured does not belong here: keep the
result and link to it."""


@dataclass(frozen=True)
class Figure:
    """A figure as it is printed, and its unit: nothing, if it is a ratio."""

    digits: str
    unit: str

    @classmethod
    def all_in(cls, text: str) -> Iterator[Figure]:
        """All numbers of a text without code."""
        for found in FIGURE.finditer(text):
            yield cls(found[1], ALIKE.get(found[2] or "", found[2] or ""))

    def __str__(self) -> str:
        return f"{self.digits} {self.unit}".strip().replace(" %", "%")

    def is_in(self, results: frozenset[Figure]) -> bool:
        """Whether they have it as it is printed here. Cells of tables may have their unit in the heading, but for %."""
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


def figures(section: Section) -> list[Figure]:
    """What a section publishes."""
    text = re.sub(r"(?m)(?:^\|.*\n)+", lambda table: "" if "| default |" in table[0] else table[0], section.text)
    # Blocks of code, code in a line, addresses of links.
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+|`[^`]*`|\]\([^)]*\)|\*\*", " ", text)
    text = re.sub(r"\s+", " ", NAMED.sub("", text))
    return [
        figure
        for figure in Figure.all_in(text)
        if figure.unit or not figure.digits.isdigit() or (section.results and len(figure.digits) > 1)
    ]


def kept_sections(page: str) -> Iterator[Section]:
    """Those whose figures have to be kept as results."""
    return (section for section in sections(page) if NOT_KEPT not in section.heading)


def without_source(page: str) -> str:
    """What a page publishes and its results do not have, in order."""
    found = ((section, figure) for section in kept_sections(page) for figure in figures(section))
    return "; ".join(str(figure) for section, figure in found if not figure.is_in(section.results))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_stands_in_the_results_that_its_section_links_to(page: Path) -> None:
    found, listed = without_source(page.read_text(encoding="utf-8")), NOT_MEASURED.get(page.name, "")
    assert found.split("; ") == listed.split("; "), "not as the results print it that the section links to, nor listed"


def test_what_is_not_measured_is_of_pages_that_exist() -> None:
    assert set(NOT_MEASURED) <= {page.name for page in PAGES}


def test_few_sections_are_without_results() -> None:
    found = [section for page in PAGES for section in sections(page.read_text(encoding="utf-8"))]
    assert [section.heading for section in found if NOT_KEPT in section.heading] == []


def test_a_changed_digit_is_noticed() -> None:
    """Most changed digits: where results have many figures, one of them may be the other by chance."""
    noticed, made = 0, 0
    for page in PAGES:
        for section in kept_sections(page.read_text(encoding="utf-8")):
            for figure in figures(section):
                # A figure without results stands in the list above digit by digit.
                is_listed = not figure.is_in(section.results)
                for place, digit in enumerate(figure.digits):
                    for other in set("0123456789") - {digit} if digit.isdigit() else ():
                        changed = Figure(figure.digits[:place] + other + figure.digits[place + 1 :], figure.unit)
                        made += 1
                        noticed += is_listed or not changed.is_in(section.results)
    assert noticed / made > 0.8


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One file of results with two sections."""
    plans = "## Of plans\n\n| machines | time, s |\n|---|---|\n| 300 | 0.53 |\n"
    trials = "## Of trials\n\n1,178 preemptions, 21%, 8 ms\n"
    (tmp_path / "speed.md").write_text(f"# Speed\n\n{plans}\n{trials}", encoding="utf-8")
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
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
    ],
)
def test_what_has_no_source(text: str, found: str) -> None:
    assert without_source(f"# Page\n\n## Section\n\n{text}\n") == found


@pytest.mark.usefixtures("results")
def test_a_link_to_a_section_of_results_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"speed\.md has no section #of-jobs"):
        without_source(f"# Page\n\n{LINKED[:-1]}#of-jobs)\n")
