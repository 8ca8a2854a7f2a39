"""Trains a convolutional network with PyTorch on a GPU; `--mib` allocates additional GPU memory."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import dike

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=0)
arguments = parser.parse_args()

torch.manual_seed(7)
device = torch.device("cuda")
images = torch.randn(4096, 3, 32, 32, device=device)
labels = torch.randint(10, (4096,), device=device)
held = torch.zeros(arguments.mib << 20, dtype=torch.uint8, device=device)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1),
    nn.ReLU(),
    nn.AvgPool2d(4),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(2048, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def save(folder: str) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "state.pt"))


def restore(folder: str) -> None:
    state = torch.load(Path(folder, "state.pt"), map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


step = dike.checkpoint(save, restore)
while True:
    chosen = torch.randint(4096, (256,), device=device)
    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    dike.report(step, loss=loss.item())
