"""The function of a search from a notebook: where it is kept, and when it goes."""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dike.exceptions import BadInputError
from dike.trial import pickled
from framework.cli import app
from framework.cli.search_options import stored_function
from framework.search.store import Store
from tests.search.stored_search import SPEC


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train"
    path.write_bytes(pickled.dump_function(lambda lr: lr))
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        ("--param", "lr"),
        ("--param", "lr=0.1", "--image", "x"),
        # The private Mesos has begun to start by then.
        pytest.param(("--param", "lr=1", "--storage", "nonsense://x"), marks=pytest.mark.integration),
    ],
)
def test_nothing_is_left_of_a_function_whose_search_is_refused(function: Path, wrong: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError):
        CliRunner().invoke(app, ["tune", "--function", str(function), *wrong], catch_exceptions=False)
    assert [path for path in Path("dike-runs").rglob("*") if path.name != "searches.db"] == []


def test_a_function_stays_as_long_as_a_search_needs_it(function: Path, storage: str) -> None:
    def refused(name: str, *, begins: bool) -> Path:
        found = []
        with contextlib.suppress(BadInputError), stored_function(function, name, storage) as kept:
            assert kept is not None
            found.append(kept[0].resolve())
            if begins:
                with closing(Store(storage)) as store:
                    store.create_search(dataclasses.replace(SPEC, name=name, script=str(found[0])))
            raise BadInputError("no")
        return found[0]

    # The search had started before it failed; later another search needs its name.
    assert refused("digits", begins=True).is_file()
    assert refused("digits", begins=False).is_file()
    function.write_bytes(pickled.dump_function(lambda lr: 2 * lr))
    assert not refused("digits", begins=False).exists()
    assert len(list(Path("dike-runs/digits/function").iterdir())) == 1
