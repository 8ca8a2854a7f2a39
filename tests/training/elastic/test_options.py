"""Options of a training job that contradict each other are one sentence, on the command line and in a request."""

from __future__ import annotations

from typing import Any

import pytest

from dike.exceptions import BadInputError
from framework.training.options import TrainingOptions, read_bounds


def test_bounds_are_read() -> None:
    assert read_bounds(None) is None
    assert read_bounds("1:4") == (1, 4)
    assert read_bounds(" 3:3 ") == (3, 3)
    assert read_bounds((1, 4)) == (1, 4)


@pytest.mark.parametrize("text", ["4:1", "0:4", "4", "1:", "a:b", "1:4:8", "-1:4", "1:1025", ""])
def test_bounds_that_make_no_sense(text: str) -> None:
    with pytest.raises(BadInputError, match="MIN:MAX"):
        read_bounds(text)


@pytest.mark.parametrize(
    ("options", "has_plan", "says"),
    [
        ({"elastic": (1, 4)}, True, "--plan"),
        ({"elastic": (1, 4), "max_workers": 4}, False, "--max-workers"),
        ({"elastic": (1, 4), "min_workers": 1}, False, "--min-workers"),
        ({"min_workers": 4, "max_workers": 2}, False, "--min-workers is 4, more than --max-workers 2"),
        ({"min_workers": 2}, True, "leave --min-workers out"),
        ({"stragglers": "replace"}, False, "add --elastic"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], has_plan: bool, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        TrainingOptions(**options).check(has_plan=has_plan)


def test_stragglers_are_replaced_where_that_is_possible() -> None:
    assert TrainingOptions(elastic=(1, 4)).on_straggler == "replace"
    assert TrainingOptions().on_straggler == "report"
    assert TrainingOptions(stragglers="ignore").on_straggler == "ignore"
