"""Says what it finds, and waits for its end."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

seen = {
    "task": json.loads(os.environ["DIKE_TASK"]),
    "tf_config": json.loads(os.environ["TF_CONFIG"]),
    "name": __name__,
    "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    "a": os.environ["A"],
    "checkpoints": os.environ["DIKE_CHECKPOINT_DIR"],
    "visible_gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    "save_timeout_s": float(os.environ["DIKE_SAVE_TIMEOUT_S"]),
    "random": [random.random(), float(np.random.rand())],
}
print(json.dumps(seen), flush=True)
while True:
    time.sleep(60)
