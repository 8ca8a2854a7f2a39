"""What is read out of a script's source: spellings of flags, and libraries worth preloading."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.trial import pickled
from dike.trial.spec import Value
from framework.project.entry_point import EntryPoint
from framework.project.script_facts import ScriptFacts, script_facts
from framework.project.script_flags import ParamStyle, script_arguments

ROOT = Path(__file__).parents[2]


def preload(tmp_path: Path, source: str) -> tuple[str, ...]:
    script = tmp_path / "train.py"
    script.write_text(source)
    return facts_of(script).preload


def flags_of(tmp_path: Path, source: str, **choices: tuple[Value, ...]) -> dict[str, str]:
    script = tmp_path / "train.py"
    script.write_text(source)
    return script_facts(EntryPoint(script, tmp_path), choices).flags


def facts_of(script: Path, *names: str) -> ScriptFacts:
    return script_facts(EntryPoint(script, script.parent), dict.fromkeys(names, (0.1,)))


@pytest.mark.parametrize(
    ("source", "name", "flag"),
    [
        ("p.add_argument('--batch_size')", "batch_size", "--batch_size"),
        ("p.add_argument('--batch-size')", "batch_size", "--batch-size"),
        ("p.add_argument('--batch_size')", "batch-size", "--batch_size"),
        ("p.add_argument('--batch-size')\np.add_argument('--batch_size')", "batch_size", "--batch_size"),
        ("p.add_argument('-n')", "n", "-n"),
        ("p.add_argument('--n')", "n", "--n"),
        ("flags.DEFINE_float('learning_rate', 0.1, '')", "learning_rate", "--learning_rate"),
        ("import options", "lr", "--lr"),
        ("import sys\nsys.argv.index('--lr')", "lr", "--lr "),
    ],
)
def test_a_flag_is_spelled_as_in_the_source(tmp_path: Path, source: str, name: str, flag: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert facts_of(script, name).flags == {name: flag}


PARSER = "import argparse\np = argparse.ArgumentParser()\n{}\np.parse_args()"
TYPER = "import typer\ndef main({}): ...\ntyper.run(main)"
CLICK = "import click\n@click.command()\n@click.option({})\ndef main(**given): ..."


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        (PARSER.format("p.add_argument('--on', type=bool)"), ["--on=True"], ["--on="]),
        (PARSER.format("p.add_argument('--on', type=bool, default=True)"), ["--on=True"], ["--on="]),
        (PARSER.format("p.add_argument('--on', action='store_true')"), ["--on"], []),
        (PARSER.format("p.add_argument('--on', action='store_false')"), ["--on"], []),
        (PARSER.format("p.add_argument('--no-on', dest='on', action='store_false')"), [], ["--no-on"]),
        (PARSER.format("p.add_argument('--on', dest='off', action='store_false')"), ["--on"], []),
        (
            PARSER.format(
                "p.add_argument('--on', dest='off', action='store_false')\np.add_argument('--off', action='store_true')"
            ),
            ["--on"],
            ["--off"],
        ),
        (
            PARSER.format(
                "p.add_argument('--on', action='store_true', default=True)\n"
                "p.add_argument('--no-on', dest='on', action='store_false')"
            ),
            ["--on"],
            ["--no-on"],
        ),
        (PARSER.format("p.add_argument('--on', action=argparse.BooleanOptionalAction)"), ["--on"], ["--no-on"]),
        (PARSER.format("p.add_argument('--on', type=int)"), ["--on=1"], ["--on=0"]),
        (PARSER.format("p.add_argument('--on', choices=['yes', 'no'])"), ["--on=yes"], ["--on=no"]),
        (PARSER.format("p.add_argument('--on', type=lambda text: text == 'True')"), ["--on=True"], ["--on=False"]),
        (
            "def flag(text):\n  return text.lower() in ('yes', 'true')\n"
            + PARSER.format("p.add_argument('--on', type=flag)"),
            ["--on=true"],
            ["--on=false"],
        ),
        ("from absl import flags\nflags.DEFINE_boolean('on', False, '')", ["--on=true"], ["--on=false"]),
        ("from absl import flags\nflags.DEFINE_bool('on', False, '')", ["--on=true"], ["--on=false"]),
        ("tf.compat.v1.flags.DEFINE_bool('on', False, '')", ["--on=true"], ["--on=false"]),
        (CLICK.format("'--on/--off'"), ["--on"], ["--off"]),
        (CLICK.format("'--on', is_flag=True"), ["--on"], []),
        (CLICK.format("'--on', type=bool"), ["--on=true"], ["--on=false"]),
        (CLICK.format("'--on', default=False"), ["--on=true"], ["--on=false"]),
        (TYPER.format("on: bool = False"), ["--on"], ["--no-on"]),
        (TYPER.format("on: bool = typer.Option(False, '--on/--off')"), ["--on"], ["--off"]),
        ("import fire\ndef main(on=False): ...\nfire.Fire(main)", ["--on=True"], ["--on=False"]),
        ("import hydra", ["on=true"], ["on=false"]),
        ("from omegaconf import OmegaConf\nOmegaConf.from_cli()", ["on=true"], ["on=false"]),
        ("import dike\ndike.params(on=True)", [], []),
    ],
)
def test_a_boolean_is_written_as_it_is_read(tmp_path: Path, source: str, on: list[str], off: list[str]) -> None:
    flags = flags_of(tmp_path, source, on=(True, False))
    assert script_arguments(flags, {"on": True}) == ([], on)
    assert script_arguments(flags, {"on": False}) == ([], off)


@pytest.mark.parametrize(
    ("source", "values", "message"),
    [
        (PARSER.format("p.add_argument('--on')"), (True, False), "The flag --on of train.py takes text"),
        ("import options", (True, False), "The source of train.py does not show the flag --on"),
        (PARSER.format("p.add_argument('--on', action='store_true')"), (1, 0), "--on of train.py takes true and false"),
        (PARSER.format("p.add_argument('--on', type=bool)"), (1, 0), "--on of train.py takes true and false only"),
        (PARSER.format("p.add_argument('--on', action='store_true', default=True)"), (True, False), "switched back"),
        (PARSER.format("p.add_argument('--on', type=int)"), (True, 2), "booleans and others"),
    ],
)
def test_a_value_that_cannot_be_written_for_certain_is_refused(
    tmp_path: Path, source: str, values: tuple[Value, ...], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        flags_of(tmp_path, source, on=values)


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        (TYPER.format("batch_size: int = 8"), "batch_size", ([], ["--batch-size=3"])),
        (TYPER.format("size: int = typer.Option(8, '-b', '--batch-size')"), "size", ([], ["--batch-size=3"])),
        (CLICK.format("'--batch-size', 'size'"), "batch_size", ([], ["--batch-size=3"])),
        (CLICK.format("'-n'"), "n", ([], ["-n", "3"])),
        (PARSER.format("p.add_argument('-n', '--number', type=int)"), "n", ([], ["-n=3"])),
        (PARSER.format("p.add_argument('--units', type=int)"), "unit", ([], ["--units=3"])),
        (
            PARSER.format(
                "p.add_argument('--seed')\nfit = p.add_subparsers().add_parser('fit')\nfit.add_argument('--lr')"
            ),
            "seed",
            (["--seed=3"], []),
        ),
        (
            PARSER.format(
                "p.add_argument('--seed')\nfit = p.add_subparsers().add_parser('fit')\nfit.add_argument('--lr')"
            ),
            "lr",
            ([], ["--lr=3"]),
        ),
        (
            "import click\n@click.group()\n@click.option('--seed')\ndef main(seed): ...\n"
            "@main.command()\n@click.option('--lr')\ndef fit(lr): ...",
            "seed",
            (["--seed=3"], []),
        ),
    ],
)
def test_a_flag_is_named_and_placed_as_its_library_wants_it(
    tmp_path: Path, source: str, name: str, words: tuple[list[str], list[str]]
) -> None:
    assert script_arguments(flags_of(tmp_path, source, **{name: (3,)}), {name: 3}) == words


ASKS = "import dike\np = dike.params(lr=0.1, units=3)\n"
TWO = PARSER.format("p.add_argument('--units')\np.add_argument('--lr')")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TWO, "train.py takes no parameter 'unist'; did you mean 'units'?"),
        ("import dike\n" + TWO, "did you mean 'units'?"),
        (ASKS + "print(p, p['lr'])", "did you mean 'units'?"),
        (ASKS.replace("p =", "asked =") + TWO, "did you mean 'units'?"),
        ("from dike import params\nlr = params(lr=0.1)['lr']", "it takes lr."),
        ("import os\nlr = float(os.environ.get('LR', 1))", "it reads no arguments and does not call dike.params"),
        ("import keras, numpy as np\nUNITS = 16\nkeras.Sequential().fit(np.ones(3))", "dike.params(unist=...)"),
    ],
)
def test_a_parameter_that_nothing_takes_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        flags_of(tmp_path, source, unist=(3,))


@pytest.mark.parametrize(
    "source",
    [
        ASKS + "train(**p)",
        "import options",
        "import keras\ndef main():\n    from options import rate\nmain()",
        "import json, os\nvalues = json.loads(os.environ['DIKE_PARAMS'])",
        ASKS + "print(p['unist'])",
        ASKS + "for name in p: ...",
        "import dike\nprint(dike.params()[name])",
        "from dike import params\nparams(**defaults)",
        TWO.replace("parse_args", "parse_known_args"),
        TWO + "\nimport sys; sys.argv",
        PARSER.format("p.add_argument('--units')\nTrainer.add_arguments(p)"),
        PARSER.format("for name in names: p.add_argument(f'--{name}')"),
        PARSER.format("p.add_argument('--units')\nadd = p.add_argument"),
        "import argparse, parsers\np = parsers.parser()\np.add_argument('--units')\np.parse_args()",
        TWO.replace("ArgumentParser()", "ArgumentParser(parents=[other.parser()])"),
        "from transformers import HfArgumentParser\nHfArgumentParser(Config).parse_args_into_dataclasses()",
    ],
)
def test_a_parameter_that_something_may_take_is_not_refused(tmp_path: Path, source: str) -> None:
    asks_dike = "import dike" in source or "from dike" in source
    assert flags_of(tmp_path, source, unist=(3,)) == ({} if asks_dike else {"unist": "--unist"})


def test_the_user_may_say_how_parameters_are_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import options")
    entry = EntryPoint(script, tmp_path)
    assert script_facts(entry, {"lr": ()}, ParamStyle.KEY_VALUE).flags == {"lr": "lr="}
    assert script_facts(entry, {"lr": ()}, ParamStyle.NONE).flags == {}


def test_flags_are_also_looked_for_in_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "options").mkdir()
    (tmp_path / "options" / "__init__.py").write_text("import train")
    (tmp_path / "options" / "parser.py").write_text("import numpy\nFLAG = '--drop-out'\n")
    script = tmp_path / "train.py"
    script.write_text("from options import parser\n")
    facts = facts_of(script, "drop_out")
    assert facts.flags == {"drop_out": "--drop-out"}
    assert facts.preload == ("numpy",)


def test_a_module_is_read_with_its_packages_and_what_it_imports_relatively(tmp_path: Path) -> None:
    package = tmp_path / "census" / "trainer"
    package.mkdir(parents=True)
    (tmp_path / "census" / "__init__.py").write_text("")
    (tmp_path / "census" / "numbers.py").write_text("FLAG = '--hidden-units'\n")
    (package / "__init__.py").write_text("import numpy\n")
    (package / "options.py").write_text("from ..numbers import FLAG\nimport pandas\n")
    (package / "task.py").write_text("from . import options\nimport settings\n")
    (package / "settings.py").write_text("import scipy\n")  # not below the root
    (tmp_path / "settings.py").write_text("import matplotlib\n")
    (tmp_path / "pandas.py").write_text("")
    entry = EntryPoint(package / "task.py", tmp_path, "census.trainer.task")
    facts = script_facts(entry, {"hidden_units": (0.1,)})
    assert facts.flags == {"hidden_units": "--hidden-units"}
    assert facts.preload == ("numpy", "matplotlib")


def test_a_package_that_is_run_is_read_from_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "__init__.py").write_text("import numpy\n")
    (tmp_path / "task" / "__main__.py").write_text("from .options import FLAG\n")
    (tmp_path / "task" / "options.py").write_text("FLAG = '--drop-out'\n")
    entry = EntryPoint(tmp_path / "task" / "__main__.py", tmp_path, "task")
    assert script_facts(entry, {"drop_out": (0.1,)}) == ScriptFacts({"drop_out": "--drop-out"}, ("numpy",))


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import tensorflow as tf", ("tensorflow",)),
        ("import tensorflow as tf\nmodel = tf.keras.Sequential()", ("tensorflow", "keras")),
        ("from tensorflow.keras import layers", ("tensorflow", "keras")),
        ("import tensorflow.compat.v1 as tf", ("tensorflow",)),
        ("import dike as tf\ntf.keras.Sequential()", ("tensorflow", "keras")),
        ("import dike\ndike.compat.v1.Session()", ("tensorflow",)),
        ("from dike.keras import layers", ("tensorflow", "keras")),
        ("from dike import nn", ("tensorflow",)),
        ("import dike\ndike.report(1, loss=2.0)\ndike.checkpoint(save, restore)", ()),
        ("from dike import params, report", ()),
        ("from dike.trial import runtime", ()),
        ("import os, json, argparse\nimport not_installed_anywhere", ()),
        ("from sklearn.datasets import load_digits", ("sklearn.datasets",)),
        ("from sklearn import datasets", ("sklearn", "sklearn.datasets")),
        ("try:\n    import numpy as np\nexcept ImportError:\n    np = None", ("numpy",)),
        ("def later():\n    import numpy", ()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy", ()),
        ("import numpy\nimport numpy", ("numpy",)),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport tensorflow\nimport numpy", ("numpy",)),
        ("import os\nos.environ.setdefault('KERAS_BACKEND', 'torch')\nimport keras", ()),
        ("import os\nos.putenv('TF_ENABLE_ONEDNN_OPTS', '0')\nimport dike as tf\ntf.keras", ()),
        # What TensorFlow reads later, or what only says how much it logs, is no reason.
        (
            "import os\nos.putenv('TF_CPP_MIN_LOG_LEVEL', '3'), os.environ['TF_CONFIG']\nimport dike as tf\ntf.keras",
            ("tensorflow", "keras"),
        ),
    ],
)
def test_what_the_script_imports_can_be_preloaded(tmp_path: Path, source: str, modules: tuple[str, ...]) -> None:
    assert preload(tmp_path, source) == modules


def test_jax_is_not_imported_before_a_script_that_sets_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "jax.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / "own").mkdir()
    assert preload(tmp_path / "own", "import jax\nimport numpy") == ("jax", "numpy")
    set_up = "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nimport jax\nimport numpy"
    assert preload(tmp_path / "own", set_up) == ("numpy",)


def test_a_module_beside_the_script_hides_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    assert preload(tmp_path, "import pandas\nimport numpy\nfrom numpy import linalg") == ()


@pytest.mark.integration
def test_nothing_of_the_script_is_run_or_imported() -> None:
    program = (
        "import sys; from pathlib import Path; from framework.project.entry_point import EntryPoint\n"
        "from framework.project.script_facts import script_facts\n"
        f"script = Path({str(ROOT / 'examples' / 'digits_cnn.py')!r})\n"
        "facts = script_facts(EntryPoint(script, script.parent), {'lr': (0.1,), 'batch_size': ()})\n"
        "print(facts.flags, [name for name in ('tensorflow', 'keras', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "{'lr': '--lr', 'batch_size': '--batch-size'} []"


def test_a_script_that_is_not_python_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\nfor\n")
    with pytest.raises(BadInputError, match=r"train\.py, line 2: this is not Python"):
        facts_of(script)
    script.write_bytes(b"x = '\xff'\n")
    with pytest.raises(BadInputError, match=r"train\.py.*: this is not Python"):
        facts_of(script)
    with pytest.raises(BadInputError, match="cannot be read"):
        facts_of(tmp_path / "none.py")


def test_a_pickled_function_names_its_libraries(tmp_path: Path) -> None:
    """They are found without loading it, which would import them here."""

    def facts_of_function(source: str) -> ScriptFacts:
        session: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "<cell 1>", "exec"), session)
        path = tmp_path / "train.function"
        path.write_bytes(pickled.dump_function(session["train"]))
        return facts_of(path, "batch_size")

    facts = facts_of_function("import numpy as np\ndef train(lr):\n    import sklearn.datasets\n    return np.exp(lr)")
    assert facts == ScriptFacts({}, ("numpy", "sklearn"))
    keras = "import dike as tf\ndef train(lr): return tf.keras.Sequential()"
    assert facts_of_function(keras).preload == ("tensorflow", "keras")
    assert facts_of_function(f"{keras}, 'TF_USE_LEGACY_KERAS'").preload == ()
    assert facts_of_function("import dike\ndef train(lr): dike.report(1, loss=lr)").preload == ()


class Touches:
    """Makes a file when it is read out of a pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_nothing_of_a_pickled_function_runs_here(tmp_path: Path) -> None:
    path = tmp_path / "touched"
    with pytest.raises(BadInputError, match=r"function given to dike\.tune cannot be read back"):
        pickled.names_in_function(pickle.dumps(Touches(path)))
    data = pickled.dump_function(Touches(path))
    assert data == pickled.dump_function(Touches(path))
    assert "pathlib" in str(pickled.names_in_function(data))
    assert not path.exists()
    pickled.load_function(data)
    assert path.exists()


def test_what_a_script_asks_dike_for_and_whether_it_validates_is_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for source, reads, validates in (
        ("import dike\nlr = dike.params(lr=1)\n", True, False),
        ("from dike import params as asked\nmodel.fit(x, y, validation_split=0.1)\n", True, True),
        ("import dike as tf\nmodel.fit(x, y, validation_data=d)\n", False, True),
        ("params = {}\n", False, False),
    ):
        script.write_text(source)
        facts = facts_of(script)
        assert (facts.reads_params, facts.validates) == (reads, validates), source
