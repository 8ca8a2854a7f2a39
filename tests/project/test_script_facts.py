"""What is read out of a script's source: spellings of flags, and libraries worth preloading."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.trial import pickled
from framework.project.entry_point import EntryPoint
from framework.project.script_facts import ScriptFacts, script_facts

ROOT = Path(__file__).parents[2]


def preload(tmp_path: Path, source: str) -> tuple[str, ...]:
    script = tmp_path / "train.py"
    script.write_text(source)
    return facts_of(script).preload


def facts_of(script: Path, *names: str) -> ScriptFacts:
    return script_facts(EntryPoint(script, script.parent), names)


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
    ],
)
def test_a_flag_is_spelled_as_in_the_source(tmp_path: Path, source: str, name: str, flag: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert facts_of(script, name).flags == {name: flag}


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
    facts = script_facts(entry, ["hidden_units"])
    assert facts.flags == {"hidden_units": "--hidden-units"}
    assert facts.preload == ("numpy", "matplotlib")


def test_a_package_that_is_run_is_read_from_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "__init__.py").write_text("import numpy\n")
    (tmp_path / "task" / "__main__.py").write_text("from .options import FLAG\n")
    (tmp_path / "task" / "options.py").write_text("FLAG = '--drop-out'\n")
    entry = EntryPoint(tmp_path / "task" / "__main__.py", tmp_path, "task")
    assert script_facts(entry, ["drop_out"]) == ScriptFacts({"drop_out": "--drop-out"}, ("numpy",))


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
        "facts = script_facts(EntryPoint(script, script.parent), ['lr', 'batch_size'])\n"
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
    assert facts == ScriptFacts({"batch_size": "--batch_size"}, ("numpy", "sklearn"))
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
