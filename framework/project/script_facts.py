"""Facts about a script read from its source: the spelling of its flags, its libraries.

The script and its imported, bundled modules are parsed, never run.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dike.exceptions import BadInputError
from dike.own_distribution import COLLECTIVE_STRATEGY
from dike.trial.pickled import names_in_function
from dike.trial.spec import Value
from framework.project.entry_point import EntryPoint
from framework.project.script_flags import ParamStyle, ScriptFlags

_TENSORFLOW = ("tensorflow", "keras", "tf_keras")
_JAX = ("jax", "flax", "optax")
_OTHER_LIBRARIES = ("numpy", "scipy", "pandas", "sklearn", "torch", "torchvision", "matplotlib", "PIL", "h5py")
PRELOADED = (*_TENSORFLOW, *_JAX, *_OTHER_LIBRARIES)
"""Libraries that are slow to import, and whose import starts no thread that a fork would lose and touches no GPU."""
_DISTRIBUTED_TRAINING = {
    "torch.distributed": frozenset(
        {"init_process_group", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "Accelerator"}
    ),
    "jax.distributed": frozenset({"jax.distributed"}),
}
"""Library -> names by which a script is recognized that distributes itself with it."""
_DIKE_NAMES = frozenset({"tune", "grid_search", "report", "checkpoint", "params"})
"""Names of `dike` that are not TensorFlow's."""
_LATE_SETTING = r"TF_CONFIG|TF_CPP_\w+|TF_FORCE_GPU_ALLOW_GROWTH|TF_GPU_ALLOCATOR|TF_NUM_\w+|TF_DATA_\w+"
"""Environment variables that TensorFlow reads after its import, or that only control logging."""
_TENSORFLOW_SETTING = re.compile(rf"(?!({_LATE_SETTING})$)TF_[A-Z0-9_]+|KERAS_BACKEND|KERAS_HOME|XLA_FLAGS")
"""Environment variables that TensorFlow or Keras reads during its import; a script must set them before."""
_JAX_SETTING = re.compile(r"(JAX|FLAX|XLA)_(?!PYTHON_CLIENT_)[A-Z0-9_]+")
"""The same for JAX and Flax; XLA_PYTHON_CLIENT* is read later."""


@dataclass(frozen=True)
class ScriptFacts:
    """What is known of a script without running it.

    Attributes:
        flags: parameter -> its flag (`framework.project.script_flags`).
        preload: modules that a zygote may import before it forks trials.
        reads_params: whether it calls `dike.params`.
        validates: whether it calls `fit` with validation data.
        distributes_itself: whether it uses a library that trains in several processes.
    """

    flags: dict[str, str]
    preload: tuple[str, ...]
    reads_params: bool = False
    validates: bool = False
    distributes_itself: bool = False


def script_facts(
    entry: EntryPoint, choices: Mapping[str, Sequence[Value]] = MappingProxyType({}), style: ParamStyle | None = None
) -> ScriptFacts:
    """Reads a script.

    Args:
        entry: the script.
        choices: parameter of the search -> its values; empty for a range.
        style: how the script takes parameters; None to detect it.

    Raises:
        BadInputError: the script cannot be read, is not Python, or does not take a parameter.
    """
    if entry.is_function:
        return ScriptFacts({}, _preloadable_of_function(entry))
    trees = _trees(entry)
    literals = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    configured = _configured_by(literals)
    modules = dict.fromkeys(name for tree in trees for name in _preloadable(tree))
    preload = [
        name for name in modules if not _files_of(top := name.partition(".")[0], entry.root) and top not in configured
    ]
    flags = script_flags(entry).flags(entry.path, choices, style) if choices else {}
    reads_params = any("params" in _names_used_of_dike(tree) for tree in trees)
    validates = any(_is_fit_with_validation(node) for tree in trees for node in ast.walk(tree))
    distributes_itself = bool(_distribution_of(trees) or _names_in(trees) & {COLLECTIVE_STRATEGY})
    return ScriptFacts(flags, tuple(preload), reads_params, validates, distributes_itself)


def _is_fit_with_validation(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit"):
        return False
    return any(
        keyword.arg in ("validation_data", "validation_split")
        and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        for keyword in node.keywords
    )


def script_flags(entry: EntryPoint) -> ScriptFlags:
    """Reads the flags that the script's source defines.

    Raises:
        BadInputError: the script cannot be read or is not Python.
    """
    trees = _trees(entry)
    later = {name for tree in trees for node in ast.walk(tree) for name, _ in _imports_in(node)}
    met = {name for tree in trees for name, _ in _imports(tree)}
    is_complete = not any(_files_of(name, entry.root) for name in later - met)
    return ScriptFlags(trees, is_complete=is_complete, libraries=_libraries(later | met, entry))


def _configured_by(texts: Iterable[str]) -> set[str]:
    """The libraries that must not be imported before the script, because it names their settings."""
    settings = ((_TENSORFLOW_SETTING, _TENSORFLOW), (_JAX_SETTING, _JAX))
    return {name for setting, names in settings if any(map(setting.fullmatch, texts)) for name in names}


def imported_libraries(entry: EntryPoint) -> list[str]:
    """Top-level modules imported by the script or its bundled modules, except bundled ones and the standard library.

    Raises:
        BadInputError: the script cannot be read or is not Python.
    """
    return _libraries((name for tree in _trees(entry) for name, _ in _imports(tree)), entry)


def own_distribution(entry: EntryPoint) -> str:
    """The library with which a script distributes itself over several processes; empty if it does not.

    Raises:
        BadInputError: the script cannot be read or is not Python.
    """
    if entry.is_function:
        return ""
    return _distribution_of(_trees(entry))


def _distribution_of(trees: Iterable[ast.Module]) -> str:
    named = _names_in(trees)
    return next((library for library, names in _DISTRIBUTED_TRAINING.items() if names & named), "")


def _names_in(trees: Iterable[ast.Module]) -> set[str]:
    """Attributes and imports in code, with their modules and without."""
    named: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                named |= {node.attr, ast.unparse(node)}
            for module, members in _imports_in(node):
                named |= {module, *members, *(f"{module}.{member}" for member in members)}
    return named


def _libraries(names: Iterable[str], entry: EntryPoint) -> list[str]:
    modules = {name.partition(".")[0] for name in names}
    return sorted(name for name in modules - sys.stdlib_module_names if not _files_of(name, entry.root))


def _trees(entry: EntryPoint) -> list[ast.Module]:
    """The script and the modules below its root that it imports, in order of discovery."""
    root = entry.root
    paths = [*_files_of(_package(entry.script, root), root), entry.script]
    trees: list[ast.Module] = []
    for path in paths:  # grows as modules are found
        tree = _parse(path)
        trees.append(tree)
        for name, members in _imports(tree, _package(path, root)):
            for module in (name, *(f"{name}.{member}" for member in members)):
                paths += [file for file in _files_of(module, root) if file not in paths]
    return trees


def _package(path: Path, root: Path) -> str:
    return ".".join(path.parent.relative_to(root).parts)


def _files_of(module: str, root: Path) -> list[Path]:
    """The files below `root` of a module and its parent packages, which take precedence over installed ones."""
    parts = module.split(".") if module else []
    places = [root.joinpath(*parts[: count + 1]) for count in range(len(parts))]
    inits = [place / "__init__.py" for place in places]
    return [file for file in (*inits, *(place.with_suffix(".py") for place in places[-1:])) if file.is_file()]


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise BadInputError(f"The script {path} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise BadInputError(f"{path}{line}: this is not Python: {error.msg}.") from error
    except ValueError as error:
        raise BadInputError(f"{path}: this is not Python: {error}.") from error


def _preloadable(tree: ast.Module) -> Iterator[str]:
    imports = list(_imports(tree))
    uses_tensorflow = _uses_tensorflow_as_dike(tree)
    for name, members in imports:
        top = name.partition(".")[0]
        if top == "tensorflow":
            uses_tensorflow = True
        elif top in PRELOADED and _is_installed(top):
            candidates = [name, *(f"{name}.{member}" for member in members)]
            yield from (candidate for candidate in candidates if _is_module(candidate))
    if uses_tensorflow and _is_installed("tensorflow"):
        yield "tensorflow"
        # TensorFlow imports Keras lazily, so each trial would import it again.
        if _mentions_keras(tree):
            yield "keras"


def _preloadable_of_function(entry: EntryPoint) -> tuple[str, ...]:
    """The libraries that a pickled function names; unpickling it would import them."""
    try:
        named = names_in_function(entry.script.read_bytes())
    except OSError as error:
        raise BadInputError(f"The function in {entry.script} cannot be read: {error.strerror}.") from error
    tops = {text.partition(".")[0] for text in named}
    if "dike" in tops and "keras" in named:
        tops.add("tensorflow")
    tops -= _configured_by(named)
    return tuple(top for top in PRELOADED if top in tops and _is_installed(top) and not _files_of(top, entry.root))


def _imports(tree: ast.AST, package: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Module and imported members of each import that runs when the module is loaded, in order.

    Without a `package`, relative imports are left out.
    """
    for node in ast.iter_child_nodes(tree):
        yield from _imports_in(node, package)
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler) and not _is_for_type_checkers(node):
            yield from _imports(node, package)


def _imports_in(node: ast.AST, package: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".") if package and node.level else []
        base = parents[: max(0, len(parents) - node.level + 1)]
        if base or not node.level:
            yield ".".join([*base, *filter(None, [node.module])]), tuple(alias.name for alias in node.names)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _names_used_of_dike(tree: ast.Module) -> set[str]:
    aliases: set[str] = set()
    asked: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top == "dike":
                    aliases.add(alias.asname or top)
                    asked.add(rest.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            top, _, rest = node.module.partition(".")
            if top == "dike":
                asked |= {rest.partition(".")[0]} if rest else {alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            asked.add(node.attr)
    return asked


def _uses_tensorflow_as_dike(tree: ast.Module) -> bool:
    """Whether `dike` is used as TensorFlow: whether a module uses any name of it that is not Dike's own."""
    return any(not _is_dikes_own(name) for name in _names_used_of_dike(tree) if name)


def _mentions_keras(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "keras")
        or (isinstance(node, ast.alias) and "keras" in node.name.split("."))
        or (isinstance(node, ast.ImportFrom) and "keras" in (node.module or "").split("."))
        for node in ast.walk(tree)
    )


def _is_dikes_own(name: str) -> bool:
    return name in _DIKE_NAMES or _is_module(f"dike.{name}")


def _is_installed(top: str) -> bool:
    return top not in sys.stdlib_module_names and importlib.util.find_spec(top) is not None


def _is_module(name: str) -> bool:
    """Whether the module exists, without importing its parent as Python's own search would."""
    top, *parts = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not parts:
        return spec is not None
    paths = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
    return any((path / "__init__.py").is_file() or path.with_suffix(".py").is_file() for path in paths)
