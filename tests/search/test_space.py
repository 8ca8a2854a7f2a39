"""Search spaces: every way to write one, and the messages for invalid ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from framework.search.records import Condition, Parameter
from framework.search.space import check_space, parse_parameter, read_space


@pytest.mark.parametrize(
    ("text", "parameter"),
    [
        ("lr=0.1,0.03,1e-4", Parameter("lr", (0.1, 0.03, 1e-4))),
        ("batch_size=16, 32", Parameter("batch_size", (16, 32))),
        ("optimizer=sgd,adam", Parameter("optimizer", ("sgd", "adam"))),
        ("nesterov=true,false", Parameter("nesterov", (True, False))),
        ("mixed=1,2.5,x,-3,.5,+1e3", Parameter("mixed", (1, 2.5, "x", -3, 0.5, 1000.0))),
        ("one=7", Parameter("one", (7,))),
        ('text="1","a,b", "c d" ,""', Parameter("text", ("1", "a,b", "c d", ""))),
        ("code=007,1_000,nan", Parameter("code", ("007", "1_000", "nan"))),
        ("path=hdfs://a:9000/b,/c", Parameter("path", ("hdfs://a:9000/b", "/c"))),
        ("url=a:b", Parameter("url", ("a:b",))),
        ("expr=a=b", Parameter("expr", ("a=b",))),
        ("dropout=0.1:0.9", Parameter("dropout", low=0.1, high=0.9)),
        ("lr=1e-5:1e-1:log", Parameter("lr", low=1e-5, high=0.1, log=True)),
        ("layers=2:8:int", Parameter("layers", low=2, high=8, is_integer=True)),
        ("units=2:64:int:log", Parameter("units", low=2, high=64, is_integer=True, log=True)),
        ("units=32:256:int:step=32", Parameter("units", low=32, high=256, is_integer=True, step=32)),
        ("dropout=0:0.5:step=0.1", Parameter("dropout", low=0, high=0.5, step=0.1)),
        ("a=1,2 if b=x,y", Parameter("a", (1, 2), when=(Condition("b", ("x", "y")),))),
        (
            'a=1:3:int if b="x and c=1" and c.d=true',
            Parameter(
                "a",
                low=1,
                high=3,
                is_integer=True,
                when=(Condition("b", ("x and c=1",)), Condition("c.d", (True,))),
            ),
        ),
        ("a=x if y,z", Parameter("a", ("x if y", "z"))),
        ('a="1 if b=2",3', Parameter("a", ("1 if b=2", 3))),
        ("units=2:64:log:int", Parameter("units", low=2, high=64, is_integer=True, log=True)),
        ("shift=-1:1", Parameter("shift", low=-1, high=1)),
        ("model.units=1,2", Parameter("model.units", (1, 2))),
        ("+lr=0.1", Parameter("+lr", (0.1,))),
        ("db/engine@here=x", Parameter("db/engine@here", ("x",))),
    ],
)
def test_a_parameter_is_read_as_meant(text: str, parameter: Parameter) -> None:
    read = parse_parameter(text)
    assert read == parameter
    assert [type(value) for value in read.choices] == [type(value) for value in parameter.choices]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "'lr' has no values"),
        ("=1,2", "'=1,2' has no name"),
        ("lr=", "a value is missing"),
        ("lr=0.1,,0.2", "a value is missing"),
        ("lr=0.1,", "a value is missing"),
        ('lr="0.1', "quotes"),
        ('lr="a"b', "quotes"),
        ("lr=0.1:x", "is not a range"),
        ("lr=0.9:0.1", "0.9 is not below 0.1"),
        ("lr=0.1:0.1", "is empty"),
        ("lr=0:1:log", "no logarithm"),
        ("lr=0.1:0.9:lgo", "did you mean 'log'"),
        ("lr=0.1:0.9:stp=2", "did you mean 'step='"),
        ("lr=0.1:0.9:step=x", "the step 'x' is not a number"),
        ("lr=0.1:0.9:step=1", "at most 0.8"),
        ("lr=0.1:0.9:step=0", "a number above 0"),
        ("n=1:9:int:step=1.5", "a whole number above 0"),
        ("lr=0.1:0.9:log:step=0.1", "leave out log or step=0.1"),
        ("lr=0:1:step=1e-9", "more than 1,000,000 steps"),
        ("lr=1 if a=", "a value is missing"),
        ("lr=0.1:0.9:int", "whole numbers"),
        ("lr=1:2:3:4", "'3' is not an option of a range"),
        ("lr=1e999,1", "cannot be used for training"),
        ("lr=1:1e999", "is infinite"),
        ("lr=0.1,0.1", "has the value 0.1 twice"),
        ("flag=true,1", "twice"),
        ("--lr=1,2", "cannot be the name"),
        ("+++lr=1,2", "cannot be the name"),
        ("l r=1,2", "cannot be the name"),
        ("1st=1,2", "cannot be the name"),
    ],
)
def test_a_wrong_parameter_is_named(text: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_parameter(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_space_needs_parameters_each_once() -> None:
    with pytest.raises(BadInputError, match="is empty"):
        check_space(())
    with pytest.raises(BadInputError, match="'batch-size' is given twice"):
        check_space((Parameter("batch_size", (1,)), Parameter("batch-size", (2,))))


def test_a_file_holds_lists_ranges_and_values(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "lr: [1e-3, 0.1]\noptimizer: [sgd, adam]\ncode: ['1e-3', '7']\nnesterov: [true, false]\n"
        "dropout: 0.1:0.9\nunits: '2:64:int:log'\nseed: 7\nlayers: 2:8\nschedule: [on, off]\n"
    )
    assert read_space(path) == (
        Parameter("lr", (1e-3, 0.1)),
        Parameter("optimizer", ("sgd", "adam")),
        Parameter("code", ("1e-3", "7")),
        Parameter("nesterov", (True, False)),
        Parameter("dropout", low=0.1, high=0.9),
        Parameter("units", low=2, high=64, is_integer=True, log=True),
        Parameter("seed", (7,)),
        Parameter("layers", low=2, high=8),
        Parameter("schedule", ("on", "off")),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a search space"),
        ("- lr\n", "is not a search space"),
        ("lr: [0.1\n", "this is not YAML"),
        ("lr: []\n", "line 1: 'lr' has no values"),
        ("lr: {a: 1}\n", "line 1: 'lr' has the unknown key 'a'"),
        ("lr: {value: 1}\n", "did you mean 'values'?"),
        ("lr: {when: {a: 1}}\n", "'lr' has no values"),
        ("lr: {values: {a: 1}}\n", "'lr' has no values"),
        ("lr: {values: [1], when: [a]}\n", "'when' of 'lr' is not a mapping"),
        ("a: 1:3:int\nlr: {values: [1], when: {a: '1:2:int'}}\n", "line 2: 'when' of 'lr' lists values"),
        ("lr: {values: [1], when: {a: 1}}\na: [1, 2]\n", "depends on 'a', which does not precede it"),
        ("layers: [1, 2]\nlr: {values: [1], when: {layer: 1}}\n", "did you mean 'layers'?"),
        ("a: [1, 2]\nlr: {values: [1], when: {a: 3}}\n", "depends on the value 3 of 'a', which it never has"),
        ("a: 1:3:int\nlr: {values: [1], when: {a: 4}}\n", "depends on the value 4 of 'a'"),
        ("lr: [[1]]\n", "takes numbers, true, false and text"),
        ("lr: null\n", "takes numbers, true, false and text"),
        ("lr: [1]\nlr: [2]\n", "duplicate key"),
        ("lr: 1:0\n", "is not below"),
        ("3: [1, 2]\n", "cannot be the name"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(content)
    with pytest.raises(BadInputError, match=message):
        read_space(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"space file .*none\.yaml cannot be read"):
        read_space(tmp_path / "none.yaml")


def test_many_choices_are_checked_in_one_pass() -> None:
    # Compared with each other they would take half an hour.
    check_space((Parameter("x", tuple(range(300_000))),))
    with pytest.raises(BadInputError, match="has the value True twice"):
        check_space((Parameter("x", (*range(300_000), True)),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")),
            "aliases",
        ),
        ("a: &a [*a]", "aliases"),
        ("lr: [1]\nlr: [2]", "line 2: duplicate key 'lr'"),
    ],
)
def test_a_file_that_stands_for_more_than_it_says_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(BadInputError, match=said) as refused:
        read_space(tmp_path / "space.yaml")
    assert "\n" not in str(refused.value)
