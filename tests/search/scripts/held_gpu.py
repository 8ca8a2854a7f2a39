"""A trial that says which GPUs it was given, and holds them until as many trials as `--together` have said so."""

import argparse
import os
import time
from pathlib import Path

import dike

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--together", type=int, required=True)
parser.add_argument("--diary", type=Path, required=True)
arguments = parser.parse_args()

with arguments.diary.open("a") as diary:
    diary.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\n")
while len(arguments.diary.read_text().splitlines()) < arguments.together:
    time.sleep(0.05)
dike.report(1, loss=arguments.lr)
