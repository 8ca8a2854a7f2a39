"""A trial that holds a known amount of GPU memory and trains nothing; says what the whole GPU uses before and then."""

import argparse
import ctypes
import json
import time
from pathlib import Path

import pynvml

import dike

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--diary", type=Path, required=True)
arguments = parser.parse_args()


def used() -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


def save(folder: str) -> None:
    Path(folder, "nothing").touch()


pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
before = used()
cuda = ctypes.CDLL("libcuda.so.1")
number, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for code in (
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(number), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(arguments.mib << 20)),
):
    if code:
        raise RuntimeError(f"CUDA error {code}")
with arguments.diary.open("a") as diary:
    diary.write(json.dumps({"mib": arguments.mib, "before": before, "held": used() - before}) + "\n")

for step in range(dike.checkpoint(save, lambda folder: None) + 1, arguments.steps + 1):
    time.sleep(0.05)
    dike.report(step, loss=arguments.mib / step)
