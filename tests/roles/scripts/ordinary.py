"""Not about TensorFlow: how a script finds itself when it runs. ACTION."""

import atexit
import json
import os
import sys

import data  # the file beside this one

atexit.register(lambda: print("at exit", flush=True))
print(
    "RESULT",
    json.dumps(
        {
            "name": __name__,
            "argv": sys.argv,
            "path": sys.path[0],
            "data": data.__file__,
            "tf_config": json.loads(os.environ["TF_CONFIG"]),
            "modules": sorted(
                name for name in sys.modules if name.partition(".")[0] in ("solver", "executor", "framework")
            ),
        }
    ),
    flush=True,
)


def fail():
    raise ValueError("the script's own fault")


action = sys.argv[1]
if action == "fail":
    fail()
if action == "exit":
    sys.exit(3)
if action == "message":
    sys.exit("that is all")
if action == "wait":
    print("waiting", flush=True)
    sys.stdin.read()
