"""Valid documents with something wrong somewhere, for Hypothesis."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([-1, 0, 2**63, 10**400, 1e300, math.nan, math.inf, "\0", "\ud800", "..", "/etc", "x" * 5000]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
Path = tuple[Any, ...]


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Where there is something in a document, itself included."""
    yield here
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, (*here, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*here, index))


@st.composite
def broken(draw: st.DrawFn, document: dict[str, Any]) -> Any:
    """The document with one to three values replaced, left out or added."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(changed))))
        if not path:
            changed = draw(st.just(changed) | ODD)
            continue
        inner = changed
        for step in path[:-1]:
            inner = inner[step]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                inner[path[-1]] = draw(ODD)
            case "remove":
                del inner[path[-1]]
            case _ if isinstance(inner, dict):
                inner[draw(st.text(max_size=5))] = draw(ODD)
            case _:
                inner.append(draw(ODD))
        if not isinstance(changed, dict | list):
            break
    return changed
