"""Detects from its source how a script takes its parameters: `--lr=0.1`, a switch, `lr=0.1`, or only `dike.params`.

The source is parsed, never run. Where a wrong guess would train with another value than the requested one, nothing is
guessed.

A parameter's flag is stored as text, so that a search can be stored and sent:

* `--lr`: one word, `--lr=0.1`; `lr=`: one word, `lr=0.1`; `-n` followed by a space: two words, `-n` and `0.1`.
* `--on|--no-on`: the part before the bar for true, the part after it for false; an empty part is no word.
* a leading `^`: the words precede the common arguments of all trials, as they belong to a parser with subcommands.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError
from dike.trial.spec import Value

_BEFORE = "^"
_PARSERS = frozenset({"argparse", "absl", "click", "typer", "fire", "hydra", "docopt", "getopt", "optparse"})
"""Modules that parse a script's arguments."""
_LIBRARIES_WITHOUT_PARSER = frozenset(
    {
        *("dike", "tensorflow", "keras", "tf_keras", "tensorflow_datasets", "torch", "torchvision", "jax", "flax"),
        *("optax", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "h5py", "PIL", "psutil", "tqdm", "yaml"),
    }
)
"""Libraries that do not parse arguments by themselves."""
_TRUE_FALSE = ("true", "false")
_BOOLEAN_WORDS = (_TRUE_FALSE, ("True", "False"), ("yes", "no"), ("1", "0"))
"""Words that a function of the script may parse as true and false."""
_BOOLEAN_PARSERS = {
    **dict.fromkeys(("int", "float"), ("1", "0")),
    **dict.fromkeys(("eval", "literal_eval"), ("True", "False")),
    **dict.fromkeys(("loads", "strtobool"), _TRUE_FALSE),
}
"""Python's own functions that parse a boolean -> the words for true and false."""
_PARSER_NAME = re.compile(r"parse|args|cli$", re.IGNORECASE)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class ParamStyle(enum.StrEnum):
    FLAGS = "flags"
    KEY_VALUE = "key=value"
    NONE = "none"


def script_arguments(flags: Mapping[str, str], parameters: Mapping[str, Value]) -> tuple[list[str], list[str]]:
    """Formats parameters as a script's arguments; one without a flag is left out.

    Returns:
        The words before the script's other arguments, and those after them.
    """
    before: list[str] = []
    after: list[str] = []
    for name, value in parameters.items():
        if name in flags:
            flag = flags[name].removeprefix(_BEFORE)
            (before if flag != flags[name] else after).extend(_words(flag, value))
    return before, after


def _words(flag: str, value: Value) -> list[str]:
    if "|" in flag:
        on, _, off = flag.partition("|")
        return [word for word in [on if value else off] if word]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if flag.endswith(" "):
        return [flag.strip(), text]
    return [f"{flag}{text}" if flag.endswith("=") else f"{flag}={text}"]


@dataclass(frozen=True)
class _Definition:
    """A flag that the source defines.

    Attributes:
        names: its spellings, such as `-n` and `--batch-size`.
        dest: the name under which the script reads it; empty if it is the spelling.
        switch: for a flag without a value: its forms for true and false, empty if they cannot be written; else None.
        means_off: whether it is a switch that stores false under another name than its spelling.
        booleans: the words that a flag with a value parses as true and false; None if unknown.
        takes_only_booleans: whether any other value would be misread.
        is_before: whether it precedes a subcommand.
        is_click: whether a short spelling takes its value only as a separate word.
    """

    names: tuple[str, ...]
    dest: str = ""
    switch: str | None = None
    means_off: bool = False
    booleans: tuple[str, str] | None = None
    takes_only_booleans: bool = False
    is_before: bool = False
    is_click: bool = False

    @property
    def plain_names(self) -> set[str]:
        """All its names, with '_' for '-' and without leading dashes."""
        spelled = {name.lstrip("-").replace("-", "_") for name in self.names}
        return spelled | ({self.dest} if self.dest else set())

    def spelling(self, name: str) -> str:
        plain = name.replace("-", "_")
        same = [one for one in self.names if one.lstrip("-").replace("-", "_") == plain]
        long = [one for one in self.names if one.startswith("--")]
        exact = [one for one in (f"--{name}", f"-{name}") if one in same]
        return [*exact, *same, *long, *self.names][0]


class ScriptFlags:
    """The flags that the source of a script defines.

    Args:
        is_complete: whether these are all of its own modules.
        libraries: imported modules that are neither its own nor Python's; None if unknown.
    """

    def __init__(
        self, trees: Iterable[ast.Module], *, is_complete: bool = True, libraries: Iterable[str] | None = None
    ) -> None:
        trees = tuple(trees)
        self._parents = {
            child: node for tree in trees for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        nodes = list(self._parents)
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._functions = {node.name: node for node in nodes if isinstance(node, _FUNCTION)}
        self.literals = {one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        imported = {name.partition(".")[0] for node in nodes for name in _imported(node)}
        self._libraries = imported & _PARSERS
        if any(_last(call.func).startswith("DEFINE_") for call in self._calls):
            self._libraries |= {"absl"}  # tf.compat.v1.flags
        called = {_last(call.func) for call in self._calls}
        self._takes_key_value = "hydra" in imported or ("from_cli" in called and not self._libraries)
        # Parsers of other libraries, such as Transformers' HfArgumentParser.
        self._has_parser = bool(self._libraries) or any(_PARSER_NAME.search(name) for name in called)
        self._reads_argv = any(_last(node) == "argv" for node in nodes)
        self._is_complete = is_complete and "importlib" not in imported
        self._may_be_read_elsewhere = libraries is None or not _LIBRARIES_WITHOUT_PARSER.issuperset(libraries)
        self._values = {
            ast.unparse(target): node.value for node in nodes if isinstance(node, ast.Assign) for target in node.targets
        }
        self._params_use = _ParamsUse(nodes, self._parents)
        self._definitions = [*self._of_argparse(), *self._of_absl(), *self._of_click(), *self._of_functions()]

    def flags(self, script: str, choices: Mapping[str, Sequence[Value]], style: ParamStyle | None) -> dict[str, str]:
        """Returns parameter -> flag; a parameter without one is only passed by `dike.params`.

        Args:
            script: the script's name, for messages.
            choices: parameter -> its values; empty for a range.
            style: chosen by the user; None to detect it.

        Raises:
            BadInputError: the form of a value is uncertain, or nothing in the script takes a parameter.
        """
        if style is ParamStyle.NONE:
            return {}
        if style is ParamStyle.KEY_VALUE or (style is None and self._takes_key_value):
            return {name: f"{name}=" for name in choices}
        flags = {name: self._flag(script, name, values) for name, values in choices.items()}
        return {name: flag for name, flag in flags.items() if flag is not None}

    def defines(self, option: str) -> bool:
        """Whether the source defines an option, such as `--min-workers`, of its own."""
        plain = option.lstrip("-").replace("-", "_")
        names = {name for one in self._definitions for name in one.plain_names}
        return bool(self.literals & {option, option.replace("_", "-")} or {plain, plain.removeprefix("no_")} & names)

    def _flag(self, script: str, name: str, values: Sequence[Value]) -> str | None:
        found = self._find(name)
        booleans = [value for value in values if isinstance(value, bool)]
        if found is None:
            return self._undefined(script, name, has_booleans=bool(booleans))
        spelling = found.spelling(name)
        start = _BEFORE if found.is_before else ""
        if (found.switch is not None or found.takes_only_booleans) and len(booleans) < max(len(values), 1):
            raise BadInputError(
                f"The flag {spelling} of {script} takes true and false only; write --param {name}=true,false."
            )
        if found.switch is not None:
            if not found.switch:
                raise BadInputError(
                    f"The flag {spelling} of {script} cannot be switched back from its default; declare it with "
                    "action=argparse.BooleanOptionalAction there."
                )
            return start + found.switch
        if not booleans:
            return f"{start}{spelling} " if found.is_click and not spelling.startswith("--") else start + spelling
        if len(booleans) < len(values):
            raise BadInputError(f"The values of {name} are booleans and others; give values of one kind.")
        if found.booleans is None:
            raise BadInputError(_boolean_unknown(f"The flag {spelling} of {script} takes text", name))
        return start + "|".join(f"{spelling}={word}" for word in found.booleans)

    def _undefined(self, script: str, name: str, *, has_booleans: bool) -> str | None:
        is_closed = self._is_closed()
        if self._params_use.is_used and (is_closed or not (self._has_parser or self._reads_argv)):
            if self._is_complete and self._params_use.is_closed and name not in self.literals | self._params_use.names:
                known = {
                    *self._params_use.names,
                    *(one.lstrip("-") for each in self._definitions for one in each.names),
                }
                raise BadInputError(_unknown_parameter(script, name, known))
            return None
        if is_closed:
            raise BadInputError(
                _unknown_parameter(script, name, {one for each in self._definitions for one in each.names})
            )
        is_without = not (self._has_parser or self._reads_argv or self._may_be_read_elsewhere)
        if is_without and self._is_complete and not any(text.startswith(("DIKE_", "-")) for text in self.literals):
            raise BadInputError(
                f"{script} takes no parameter '{name}': it reads no arguments and does not call dike.params; read it "
                f"by dike.params({name.replace('-', '_')}=...) there, or give the script a flag --{name}."
            )
        spelled = [name, name.replace("_", "-"), name.replace("-", "_")]
        spellings = [f"-{name}", f"--{name}"] if len(name) == 1 else [f"--{one}" for one in spelled]
        flag = next((spelling for spelling in spellings if spelling in self.literals), f"--{name}")
        if has_booleans:
            raise BadInputError(_boolean_unknown(f"The source of {script} does not show the flag {flag}", name))
        # A script that reads sys.argv itself expects the value as the next word.
        return f"{flag} " if self._reads_argv and not self._libraries else flag

    def _find(self, name: str) -> _Definition | None:
        plain = name.replace("-", "_")
        found = [one for one in self._definitions if plain in one.plain_names]
        if not found and "argparse" in self._libraries and not self._has_keyword("allow_abbrev"):
            # argparse accepts an unambiguous prefix of a long flag.
            starts = (f"--{name}", f"--{name.replace('_', '-')}")
            found = [one for one in self._definitions if any(spelled.startswith(starts) for spelled in one.names)]
            found = found if len(found) == 1 else []
        if not found:
            return None
        on = [one for one in found if one.switch is not None and not one.means_off]
        off = [one for one in found if one.means_off]
        if len(found) == 2 and len(on) == len(off) == 1:
            return dataclasses.replace(on[0], switch=f"{_long(on[0])}|{_long(off[0])}")
        exact = [one for one in found if {f"--{name}", f"-{name}"} & set(one.names)]
        chosen = (exact or found)[0]
        if chosen.means_off and plain != chosen.dest:
            # Named like the flag: true means to pass it.
            other = [one for one in self._definitions if chosen.dest in one.plain_names and not one.means_off]
            back = _long(other[0]) if other and other[0].switch is not None else ""
            return dataclasses.replace(chosen, switch=chosen.switch and f"{_long(chosen)}|{back}")
        is_before = all(one.is_before for one in found)
        if any((one.switch is None, one.booleans) != (chosen.switch is None, chosen.booleans) for one in found):
            # Several parsers define it, with different values.
            return _Definition(chosen.names, chosen.dest, is_before=is_before, is_click=chosen.is_click)
        return dataclasses.replace(chosen, is_before=is_before)

    def _has_keyword(self, name: str) -> bool:
        return any(keyword.arg == name for call in self._calls for keyword in call.keywords)

    def _is_closed(self) -> bool:
        """Whether the source shows all flags of the script, so that its parser refuses any other."""
        if self._libraries != {"argparse"} or not self._is_complete or self._reads_argv:
            return False
        called = {_last(call.func) for call in self._calls}
        if "parse_args" not in called or called & {"parse_known_args", "parse_known_intermixed_args"}:
            return False
        for call in self._calls:
            own = call.func.value if isinstance(call.func, ast.Attribute) else call
            if _last(call.func) == "parse_args" and (self._parser(own) != "root" or call.args or call.keywords):
                return False
            if _last(call.func) == "add_argument":
                named = [argument for argument in call.args if isinstance(_constant(argument), str)]
                if not named or len(named) != len(call.args):
                    return False
            if any(not self._parser(one) for each in _keywords_named(call, "parents") for one in each):
                return False
            # A function which gets the parser may add flags to it, unless the source shows that function.
            given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "parents")]
            if any(self._parser(one) for one in given) and not self._is_shown(call):
                return False
        uses = [node for node in self._parents if _last(node) in ("add_argument", "_add_action")]
        return all(isinstance(self._parents[use], ast.Call) and self._parents[use].func is use for use in uses)  # type: ignore[attr-defined]

    def _is_shown(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id in self._functions

    # Flags declared with each library.

    def _of_argparse(self) -> Iterator[_Definition]:
        if "argparse" not in self._libraries:
            return
        has_subcommands = any(_last(call.func) == "add_subparsers" for call in self._calls)
        lists = [one.value for call in self._calls for one in call.keywords if one.arg == "parents"]
        inherited = {ast.unparse(part) for each in lists for part in getattr(each, "elts", ())}
        for call in self._calls:
            names = _texts(call.args)
            if _last(call.func) == "add_argument" and isinstance(call.func, ast.Attribute) and _are_flags(names):
                parser = call.func.value
                is_before = has_subcommands and self._parser(parser) == "root" and ast.unparse(parser) not in inherited
                yield dataclasses.replace(self._argument(call, names), is_before=is_before)

    def _parser(self, node: ast.AST | None) -> str:
        """Which parser an expression is: `root`, `sub` for a subcommand's; empty if the source does not show it."""
        for _ in range(20):
            if isinstance(node, ast.Call):
                called = _last(node.func)
                if called in ("ArgumentParser", "add_parser"):
                    return "root" if called == "ArgumentParser" else "sub"
                if called not in ("add_argument_group", "add_mutually_exclusive_group", "add_subparsers"):
                    return ""
                node = node.func.value if isinstance(node.func, ast.Attribute) else None
            elif isinstance(node, ast.Name | ast.Attribute):
                node = self._values.get(ast.unparse(node))
            else:
                break
        return ""

    def _argument(self, call: ast.Call, names: tuple[str, ...]) -> _Definition:
        given = _keywords(call)
        definition = _Definition(names, str(_constant(given.get("dest")) or "").replace("-", "_"))
        long = _long(definition)
        action = given.get("action")
        if action is not None and _last(action) == "BooleanOptionalAction":
            return dataclasses.replace(definition, switch=f"{long}|--no-{long[2:]}")
        kind = _constant(action)
        if kind in ("store_true", "store_false"):
            default = given.get("default")
            stored = kind == "store_true"
            # Without the switch the default applies, which must be the other value.
            is_usual = default is None or (isinstance(default, ast.Constant) and bool(default.value) is not stored)
            means_off = not stored and definition.dest not in ("", long.lstrip("-").replace("-", "_"))
            switch = "" if not is_usual else f"|{long}" if means_off else f"{long}|"
            return dataclasses.replace(definition, switch=switch, means_off=means_off)
        if action is not None and kind not in ("store", "append", "extend"):
            return definition
        return dataclasses.replace(definition, **self._typed(given.get("type"), given.get("choices")))

    def _typed(self, kind: ast.expr | None, choices: ast.expr | None = None) -> dict[str, Any]:
        """The words that a flag of a type parses as booleans."""
        name = "" if kind is None else _last(kind)
        if name == "bool" and name not in self._functions:
            # bool("False") is true, and bool("") is false.
            return {"booleans": ("True", ""), "takes_only_booleans": True}
        if choices is not None:
            words = {str(_constant(one)) for one in getattr(choices, "elts", ())}
            return {"booleans": next((pair for pair in _BOOLEAN_WORDS if words >= set(pair)), None)}
        if kind is None or name == "str":
            return {}
        body: ast.AST | None = kind if isinstance(kind, ast.Lambda) else self._functions.get(name)
        if body is None:
            return {"booleans": _BOOLEAN_PARSERS.get(name)}
        texts = {text for part in ast.walk(body) if isinstance(text := _constant(part), str)}
        named = {_last(part) for part in ast.walk(body)}
        pair = next((pair for pair in _BOOLEAN_WORDS if texts & set(pair)), None)
        return {
            "booleans": pair or next((words for reader, words in _BOOLEAN_PARSERS.items() if reader in named), None)
        }

    def _of_absl(self) -> Iterator[_Definition]:
        for call in self._calls:
            name = _texts(call.args[:1])
            kind = _last(call.func).removeprefix("DEFINE_")
            if kind != _last(call.func) and name:
                booleans = {"boolean": _TRUE_FALSE, "bool": _TRUE_FALSE, "integer": ("1", "0"), "float": ("1", "0")}
                words = booleans.get(kind)
                if kind == "enum" and len(call.args) > 2:
                    words = self._typed(None, call.args[2])["booleans"]
                yield _Definition((f"--{name[0]}",), booleans=words)

    def _of_click(self) -> Iterator[_Definition]:
        for function in self._functions.values():
            is_group = any(_last(_called(one)) == "group" for one in function.decorator_list)
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and _last(decorator.func) == "option":
                    yield dataclasses.replace(self._option(decorator), is_before=is_group, is_click=True)

    def _option(self, call: ast.Call, kind: ast.expr | None = None) -> _Definition:
        """An option of click, or of typer with its type."""
        given = _keywords(call)
        texts = _texts(call.args)
        dest = next((text for text in texts if not text.startswith("-")), "")
        spelled = [text for text in texts if text.startswith("-")]
        default = given.get("default")
        is_boolean = isinstance(default, ast.Constant) and isinstance(default.value, bool)
        kind = given.get("type", kind)
        is_boolean = (is_boolean and kind is None) or (kind is not None and _last(kind) in ("bool", "BOOL"))
        for text in spelled:
            on, slash, off = text.partition("/")
            if slash:
                names = tuple(one.partition("/")[0].strip() for one in spelled)
                return _Definition(names, dest, f"{on.strip()}|{off.strip()}")
        names = tuple(spelled)
        if isinstance(is_flag := given.get("is_flag"), ast.Constant) and is_flag.value:
            is_on = isinstance(default, ast.Constant) and bool(default.value)
            return _Definition(names, dest, "" if is_on else f"{_long(_Definition(names))}|")
        if is_boolean:
            return _Definition(names, dest, booleans=_TRUE_FALSE)
        if kind is not None and _last(kind) in ("INT", "FLOAT"):
            return _Definition(names, dest, booleans=("1", "0"))
        return _Definition(names, dest, **self._typed(kind))

    def _of_functions(self) -> Iterator[_Definition]:
        """Flags for parameters of a function: typer's commands, and fire's targets."""
        given = {
            argument.id: (call.func.value.id, "")
            for call in self._calls
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
            if call.func.attr in ("run", "Fire")
            for argument in call.args[:1]
            if isinstance(argument, ast.Name)
        }
        for function in self._functions.values():
            marks = {_last(_called(one)) for one in function.decorator_list}
            if "typer" in self._libraries and (marks & {"command", "callback"} or given.get(function.name, ("",))[0]):
                for argument, default in _with_defaults(function):
                    found = self._typer_option(argument, default)
                    if found is not None:
                        yield dataclasses.replace(found, is_before="callback" in marks, is_click=True)
            elif "fire" in self._libraries:
                for argument, _ in _with_defaults(function):
                    yield _Definition((f"--{argument.arg}",), booleans=("True", "False"))

    def _typer_option(self, argument: ast.arg, default: ast.expr | None) -> _Definition | None:
        kind = argument.annotation
        option = default if isinstance(default, ast.Call) else None
        if kind is not None and _last(_called(kind)) == "Annotated" and isinstance(kind, ast.Subscript):
            parts = getattr(kind.slice, "elts", [kind.slice])
            option = next((part for part in parts[1:] if isinstance(part, ast.Call)), option)
            kind = parts[0]
        if (option is not None and _last(option.func) == "Argument") or (option is None and default is None):
            return None  # a positional argument
        names = () if option is None else tuple(text for text in _texts(option.args) if text.startswith("-"))
        plain = argument.arg.replace("_", "-")
        if kind is not None and "bool" in ast.unparse(kind):
            if not names:
                return _Definition((f"--{plain}",), argument.arg, f"--{plain}|--no-{plain}")
            written = _Definition(names, argument.arg)
            if not any("/" in name for name in names):
                is_on = isinstance(default, ast.Constant) and bool(default.value)
                return dataclasses.replace(written, switch="" if is_on else f"{_long(written)}|")
        if option is None or not names:
            return _Definition((f"--{plain}",), argument.arg, **self._typed(kind))
        return dataclasses.replace(self._option(option, kind), dest=argument.arg)


class _ParamsUse:
    """The script's use of `dike.params`.

    Attributes:
        names: the parameters that it names.
        is_closed: whether it can read no others.
    """

    def __init__(self, nodes: Sequence[ast.AST], parents: Mapping[ast.AST, ast.AST]) -> None:
        modules = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "dike"
        }
        direct = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "dike"
            for alias in node.names
            if alias.name == "params"
        }
        uses = [
            node
            for node in nodes
            if (isinstance(node, ast.Name) and node.id in direct and isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.Attribute) and node.attr == "params" and ast.unparse(node.value) in modules)
        ]
        calls = [call for use in uses if isinstance(call := parents[use], ast.Call) and call.func is use]
        self.is_used = bool(uses)
        self.names = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
        self.is_closed = (
            bool(calls)
            and len(calls) == len(uses)
            and all(keyword.arg for call in calls for keyword in call.keywords)
            and all(self._is_read_by_name(call, nodes, parents) for call in calls)
        )

    @staticmethod
    def _is_read_by_name(call: ast.Call, nodes: Sequence[ast.AST], parents: Mapping[ast.AST, ast.AST]) -> bool:
        """Whether only values of literal names are read from the result of a call."""
        place = parents[call]
        if isinstance(place, ast.Subscript):
            return isinstance(place.slice, ast.Constant)
        if not (isinstance(place, ast.Assign) and len(place.targets) == 1 and isinstance(place.targets[0], ast.Name)):
            return False
        name = place.targets[0].id
        for node in nodes:
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                use = parents[node]
                by_key = isinstance(use, ast.Subscript) and isinstance(use.slice, ast.Constant)
                is_shown = isinstance(use, ast.Call) and _last(use.func) == "print"
                if not (by_key or is_shown or isinstance(use, ast.FormattedValue)):
                    return False
        return True


def _boolean_unknown(what: str, name: str) -> str:
    return (
        f"{what}, so how it reads true and false is unknown; give it the words in double quotes, as in --param "
        f'\'{name}="true","false"\', or read {name} with dike.params() and add --param-style none.'
    )


def _unknown_parameter(script: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, [one.lstrip("-") for one in names], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(names) or 'none'}."
    return f"{script} takes no parameter '{name}'; {hint}"


def _long(definition: _Definition) -> str:
    return next((name for name in definition.names if name.startswith("--")), definition.names[0])


def _last(node: ast.AST) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else node


def _constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _texts(nodes: Iterable[ast.AST]) -> tuple[str, ...]:
    return tuple(text for node in nodes if isinstance(text := _constant(node), str))


def _are_flags(names: Sequence[str]) -> bool:
    return bool(names) and names[0].startswith("-")


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _keywords_named(call: ast.Call, name: str) -> list[list[ast.expr]]:
    """Elements of the lists passed as this keyword; a value that is not a list is returned as such."""
    return [getattr(one.value, "elts", [one.value]) for one in call.keywords if one.arg == name]


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module or "",) if isinstance(node, ast.ImportFrom) and not node.level else ()


def _with_defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """The parameters of a function that can be named, with their defaults."""
    positional = [*function.args.posonlyargs, *function.args.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    pairs = list(zip(positional, [*missing, *function.args.defaults], strict=True))
    return [*pairs, *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)]
