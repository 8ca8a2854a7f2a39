"""Parses search spaces: `--param name=a,b,c`, `--param name=1e-5:1e-1:log`, or a YAML file of these.

A condition follows the values: `--param 'units_2=16:64:int if layers=2,3'`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dike.exceptions import BadInputError
from dike.trial.spec import Value
from framework.policies.trials.pbt import PbtPolicy
from framework.policies.trials.registry import check_learning, make_policy
from framework.search.records import MAX_TRIALS, Condition, Parameter, SearchSpec
from framework.search.samplers import EXHAUSTIVE, grid_size, learns
from solver.strict_yaml import load_yaml

# Hydra's names have dots, and a leading '+' for new keys.
_NAME = re.compile(r"\+{0,2}[A-Za-z_][A-Za-z0-9_./@-]*")
# A number with leading zeros is an identifier, and stays text.
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.?[0-9]+)([eE][+-]?[0-9]+)?")
_FIELD = re.compile(r'\s*(?:"([^"]*)"|([^",]*))\s*(,|$)')
_YAML_NULL = "tag:yaml.org,2002:null"
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_OPTIONS = ("log", "int")
_STEP = "step="
_FORMS = "NAME=A,B,C or NAME=LOW:HIGH with :log, :int or :step=X behind it"
_IF = re.compile(rf"\s+if\s+(?={_NAME.pattern}\s*=)")
_AND = re.compile(rf"\s+and\s+(?={_NAME.pattern}\s*=)")
_MAPPING = ("values", "when")
MORE_TRIALS = "add trials with --trials N, or values to a list with --param NAME=..."
"""What to do with a search that has tried everything."""
MAX_STEPS = 1_000_000
"""Maximum number of values of a range with steps."""


def parse_parameter(text: str) -> Parameter:
    """Parses `name=a,b,c`, `name=0.1:0.9`, `name=1e-5:1e-1:log`, `name=2:8:int` or `name=32:256:int:step=32`.

    Values are integers, floats, `true`, `false` or text; quoted values are text. A condition may follow:
    `name=2:8:int if other=a,b and third=true`.

    Raises:
        BadInputError: if the text is none of these.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if equals and not name:
        raise BadInputError(f"--param '{text}' has no name; write {_FORMS}.")
    if not equals:
        raise BadInputError(f"--param '{text}' has no values; write {_FORMS}.")
    parameter = _parse_values(name, values, f"--param {text}")
    check_space((dataclasses.replace(parameter, when=()),))
    return parameter


def read_space(path: Path) -> tuple[Parameter, ...]:
    """Reads a space from YAML: a mapping from names to a list of values, a range as text (`1e-5:1e-1:log`) or a value.

    Instead of these, a mapping has `values`, one of these, and `when`: other parameters, and those of their values for
    which this one is used.

    Raises:
        BadInputError: if the file cannot be read or is malformed.
    """
    tree, _ = load_yaml(path, "space file")
    if not isinstance(tree, yaml.MappingNode) or not tree.value:
        raise BadInputError(f"{path} is not a search space; write a line such as `lr: [0.1, 0.01]` for each parameter.")
    space = tuple(_from_yaml(str(key.value), value, path) for key, value in tree.value)
    check_space(space)
    return space


def check_space(space: Sequence[Parameter]) -> None:
    """Validates a search space.

    Raises:
        BadInputError: if it is empty, or a parameter is invalid.
    """
    if not space:
        raise BadInputError("The search space is empty; name a parameter, as in --param lr=0.1,0.01.")
    seen: set[str] = set()
    for parameter in space:
        name = parameter.name
        if not _NAME.fullmatch(name):
            raise BadInputError(
                f"{name!r} cannot be the name of a parameter: a name is letters, digits and _-./@, a letter first."
            )
        if (spelled := name.replace("-", "_")) in seen:
            raise BadInputError(f"The parameter '{name}' is given twice; give all its values together.")
        seen.add(spelled)
        if parameter.choices:
            _check_choices(parameter)
        else:
            _check_range(parameter)
    _check_conditions(space)


def check_policy(spec: SearchSpec) -> None:
    """Checks that a search can use its policy.

    Raises:
        BadInputError: if the policy is unknown, or other options do not fit it.
    """
    make_policy(spec.policy, spec.settings)
    check_learning(spec.policy, spec.warm_start_from)
    names = [parameter.name for parameter in spec.space]
    if spec.policy != PbtPolicy.name:
        if spec.mutate:
            raise BadInputError(f"--mutate is for --policy {PbtPolicy.name}; '{spec.policy}' changes no parameters.")
        return
    listed = f"--mutate {names[0]}" if names else "--mutate NAME"
    if not names:
        raise BadInputError("The policy pbt varies parameters of --param or --space; a function of Optuna has none.")
    if not spec.mutate:
        raise BadInputError(
            f"The policy pbt needs the parameters that may change while a trial trains: {listed}. Those of the "
            "model's size cannot."
        )
    for name in spec.mutate:
        if name not in names:
            raise BadInputError(
                f"--mutate '{name}' is not a parameter of the search; {nearest(name, names) or f'write {listed}.'}"
            )
    if spec.stop:
        raise BadInputError("The policy pbt replaces poor trials by copies of good ones; leave out --stop.")
    if learns(spec):
        raise BadInputError(
            f"The policy pbt trains all trials from the start, before the sampler {spec.sampler} could learn; leave "
            "out --sampler, or use random, grid or qmc."
        )


def extended(spec: SearchSpec, trials: int | None, space: Sequence[Parameter]) -> SearchSpec:
    """Returns a search with more trials, and more values of its parameters.

    Args:
        spec: the search.
        trials: number of further trials; None for none, but for all points that further values add to a grid.
        space: parameters of the search; values that they do not have yet are added.

    Raises:
        BadInputError: if a parameter is unknown or not a list of values, or nothing is left to try.
    """
    known = {parameter.name: parameter for parameter in spec.space}
    for other in space:
        if other.name not in known:
            hint = nearest(other.name, known) or "a search keeps its parameters."
            raise BadInputError(f"The search '{spec.name}' has no parameter '{other.name}'; {hint}")
        own = known[other.name]
        if bool(own.choices) != bool(other.choices) or (
            not own.choices and dataclasses.replace(other, when=own.when) != own
        ):
            raise BadInputError(
                f"The parameter '{own.name}' of the search '{spec.name}' keeps its range; only lists get more values."
            )
        known[own.name] = dataclasses.replace(own, choices=tuple(dict.fromkeys((*own.choices, *other.choices))))
    longer = tuple(known.values())
    count = spec.trial_count + (trials or 0)
    if spec.sampler in EXHAUSTIVE and not spec.sampler_object and not spec.space_function:
        size = grid_size(longer)
        if longer != spec.space and trials is None:
            count += size - grid_size(spec.space)
        count = min(size, count)
        if trials is not None and count <= spec.trial_count:
            listed = next((each.name for each in longer if each.choices), longer[0].name)
            raise BadInputError(
                f"The search '{spec.name}' has a trial for each of the {size} points of its grid; add values with "
                f"--param {listed}=..."
            )
    if longer != spec.space:
        check_space(longer)
    if count > MAX_TRIALS:
        raise BadInputError(f"The search '{spec.name}' would have {count:,} trials; the maximum is {MAX_TRIALS:,}.")
    return dataclasses.replace(spec, space=longer, trial_count=count)


def parse_value(text: str) -> Value:
    """Converts text to an integer, float or boolean if possible."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not re.match(r"[+-]?0[0-9]", text):
        return float(text)
    return text


def _parse_values(name: str, text: str, where: str) -> Parameter:
    values, *conditions = _split_outside_quotes(_IF, text.strip(), 1)
    when = tuple(_condition(each, where) for part in conditions for each in _split_outside_quotes(_AND, part))
    return dataclasses.replace(_unconditional(name, values, where), when=when)


def _split_outside_quotes(separator: re.Pattern[str], text: str, maximum: int = -1) -> list[str]:
    found: list[str] = []
    at = 0
    for match in separator.finditer(text):
        if text.count('"', 0, match.start()) % 2 == 0 and len(found) != maximum:
            found.append(text[at : match.start()])
            at = match.end()
    return [*found, text[at:]]


def _condition(text: str, where: str) -> Condition:
    name, _, values = text.partition("=")
    return Condition(name.strip(), tuple(_split(values, where)))


def _unconditional(name: str, text: str, where: str) -> Parameter:
    if ":" in text and '"' not in text and "," not in text:
        parts = [part.strip() for part in text.split(":")]
        low, high, options = parse_value(parts[0]), parse_value(parts[1]), parts[2:]
        if _is_number(low) and _is_number(high):
            return _range(name, low, high, options, where)
        if _is_number(low) or _is_number(high):
            raise BadInputError(f"{where}: '{text}' is not a range; write {_FORMS}.")
    return Parameter(name, tuple(_split(text, where)))


def _range(name: str, low: Any, high: Any, options: Sequence[str], where: str) -> Parameter:
    step = None
    for option in options:
        if option.startswith(_STEP):
            step = parse_value(option.removeprefix(_STEP))
            if not _is_number(step):
                raise BadInputError(f"{where}: the step '{option.removeprefix(_STEP)}' is not a number.")
        elif option not in _OPTIONS:
            hint = nearest(option, (*_OPTIONS, _STEP)) or "a range may be followed by :log, :int and :step=X."
            raise BadInputError(f"{where}: '{option}' is not an option of a range; {hint}")
    is_integer = "int" in options
    if is_integer and not (float(low).is_integer() and float(high).is_integer()):
        raise BadInputError(f"{where}: a range with :int needs whole numbers as bounds, not {low} and {high}.")
    step = None if step is None else float(step)
    return Parameter(name, low=float(low), high=float(high), is_integer=is_integer, log="log" in options, step=step)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def _split(text: str, where: str) -> list[Value]:
    values: list[Value] = []
    at, separator = 0, ","
    while separator:
        field = _FIELD.match(text, at)
        if field is None:
            raise BadInputError(f"{where}: the quotes in {text} do not enclose whole values.")
        quoted, plain, separator = field.groups()
        if quoted is None and not plain.strip():
            raise BadInputError(f"{where}: a value is missing; write {_FORMS}.")
        values.append(parse_value(plain.strip()) if quoted is None else quoted)
        at = field.end()
    return values


def _from_yaml(name: str, node: yaml.Node, path: Path) -> Parameter:
    """Parses a value as `--param` would, as YAML reads 1e-5 as text, 2:8 as 128 and `on` as true."""
    where = f"{path}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        return _conditional(name, node, path, where)
    if isinstance(node, yaml.ScalarNode) and (":" in node.value or _IF.search(node.value)):
        return _parse_values(name, node.value, where)
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not nodes:
        raise BadInputError(f"{where}: '{name}' has no values; list some.")
    values: list[Value] = []
    for item in nodes:
        if not isinstance(item, yaml.ScalarNode) or item.tag == _YAML_NULL:
            raise BadInputError(f"{where}: '{name}' takes numbers, true, false and text, nothing else.")
        # A plain scalar has no style; quoted scalars are text.
        values.append(item.value if item.style else parse_value(item.value))
    return Parameter(name, tuple(values))


def _conditional(name: str, node: yaml.MappingNode, path: Path, where: str) -> Parameter:
    """Parses `{values: ..., when: {OTHER: ...}}`."""
    given = {str(key.value): value for key, value in node.value}
    for key in given:
        if key not in _MAPPING:
            hint = nearest(key, _MAPPING) or "write {values: ..., when: {OTHER: [A, B]}}."
            raise BadInputError(f"{where}: '{name}' has the unknown key '{key}'; {hint}")
    when = given.get("when")
    if "values" not in given or isinstance(given["values"], yaml.MappingNode):
        raise BadInputError(f"{where}: '{name}' has no values; write {{values: [A, B], when: {{OTHER: [C]}}}}.")
    parameter = _from_yaml(name, given["values"], path)
    if when is None:
        return parameter
    if not isinstance(when, yaml.MappingNode):
        raise BadInputError(f"{where}: 'when' of '{name}' is not a mapping; write when: {{OTHER: [A, B]}}.")
    others = [_from_yaml(str(key.value), value, path) for key, value in when.value]
    if any(not other.choices for other in others):
        raise BadInputError(f"{where}: 'when' of '{name}' lists values, such as when: {{layers: [2, 3]}}, not ranges.")
    conditions = tuple(Condition(other.name, other.choices) for other in others)
    return dataclasses.replace(parameter, when=(*parameter.when, *conditions))


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choices(parameter: Parameter) -> None:
    seen = set()
    for value in parameter.choices:
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInputError(
                f"The parameter '{parameter.name}' has the value {value}, which cannot be used for training."
            )
        # True equals 1 and 1 equals 1.0, so samplers cannot distinguish them.
        if value in seen:
            raise BadInputError(f"The parameter '{parameter.name}' has the value {value!r} twice; leave one out.")
        seen.add(value)


def _check_range(parameter: Parameter) -> None:
    name, low, high = parameter.name, parameter.low, parameter.high
    if not (math.isfinite(low) and math.isfinite(high)):
        raise BadInputError(f"The range of '{name}' is infinite; give two finite numbers.")
    if low >= high:
        raise BadInputError(f"The range of '{name}' is empty: {low:g} is not below {high:g}.")
    if parameter.is_integer and not (low.is_integer() and high.is_integer()):
        raise BadInputError(f"The range of '{name}' has whole numbers as bounds, not {low:g}:{high:g}.")
    if parameter.log and low <= 0:
        raise BadInputError(f"The range of '{name}' begins at {low:g}, where there is no logarithm; begin above 0.")
    step = parameter.step
    if step is None:
        return
    if parameter.log:
        raise BadInputError(f"The range of '{name}' is logarithmic, so it has no step; leave out log or step={step:g}.")
    if not 0 < step <= high - low or (parameter.is_integer and not step.is_integer()):
        kind = "a whole number" if parameter.is_integer else "a number"
        raise BadInputError(f"The step of '{name}' is {step:g}; it is {kind} above 0, at most {high - low:g}.")
    if (high - low) / step > MAX_STEPS:
        raise BadInputError(f"The range of '{name}' has more than {MAX_STEPS:,} steps; take longer ones.")


def _check_conditions(space: Sequence[Parameter]) -> None:
    earlier: dict[str, Parameter] = {}
    for parameter in space:
        for condition in parameter.when:
            other = earlier.get(condition.parameter)
            if other is None:
                hint = nearest(condition.parameter, earlier) or "name a parameter that is listed before it."
                raise BadInputError(
                    f"The parameter '{parameter.name}' depends on '{condition.parameter}', which does not precede it; "
                    f"{hint}"
                )
            for value in condition.values:
                if not _has_value(other, value):
                    raise BadInputError(
                        f"The parameter '{parameter.name}' depends on the value {value!r} of '{other.name}', which it "
                        "never has."
                    )
        earlier[parameter.name] = parameter


def _has_value(parameter: Parameter, value: Value) -> bool:
    if parameter.choices:
        return value in parameter.choices
    if not _is_number(value) or not parameter.low <= float(value) <= parameter.high:
        return False
    return not parameter.is_integer or float(value).is_integer()
