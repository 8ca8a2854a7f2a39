"""`--elastic` and `--stragglers`: what makes no sense is one sentence."""

from __future__ import annotations

import pytest

from dike.exceptions import BadInputError
from framework.training.elastic.options import read_bounds, read_stragglers


def test_bounds_are_read() -> None:
    assert read_bounds(None, min_workers=None, max_workers=None, has_plan=False) is None
    assert read_bounds("1:4", min_workers=None, max_workers=None, has_plan=False) == (1, 4)
    assert read_bounds(" 3:3 ", min_workers=None, max_workers=None, has_plan=False) == (3, 3)


@pytest.mark.parametrize("text", ["4:1", "0:4", "4", "1:", "a:b", "1:4:8", "-1:4", "1:1025", ""])
def test_bounds_that_make_no_sense(text: str) -> None:
    with pytest.raises(BadInputError, match="MIN:MAX"):
        read_bounds(text, min_workers=None, max_workers=None, has_plan=False)


def test_bounds_beside_what_contradicts_them() -> None:
    with pytest.raises(BadInputError, match="--plan"):
        read_bounds("1:4", min_workers=None, max_workers=None, has_plan=True)
    with pytest.raises(BadInputError, match="--max-workers"):
        read_bounds("1:4", min_workers=None, max_workers=4, has_plan=False)


def test_stragglers() -> None:
    assert read_stragglers(None, is_elastic=True) == "replace"
    assert read_stragglers(None, is_elastic=False) == "report"
    assert read_stragglers("ignore", is_elastic=False) == "ignore"
    with pytest.raises(BadInputError, match="--elastic"):
        read_stragglers("replace", is_elastic=False)
    with pytest.raises(BadInputError, match="did you mean report"):
        read_stragglers("reprot", is_elastic=True)
