"""Trains a small network on scikit-learn's handwritten digits with PyTorch.

    python examples/torch_trial.py        trains once
    dike tune examples/torch_trial.py --param lr=0.1,0.03,0.01 --param dropout=0.1:0.5
                                          runs trials that share the slots; one that is suspended loses nothing

What makes it a trial that can be suspended are two calls: `dike.checkpoint` says how to save and restore, `dike.report`
how training goes. PyTorch's and Python's random states are saved by Dike.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import dike


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    train, test = slice(None, 1500), slice(1500, None)
    steps_per_epoch = len(images[train]) // arguments.batch_size

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(arguments.dropout), nn.Linear(128, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    order = torch.empty(0, dtype=torch.int64)  # of the epoch's samples

    def save(folder: str) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "order": order}
        torch.save(state, Path(folder, "state.pt"))

    def restore(folder: str) -> None:
        nonlocal order
        state = torch.load(Path(folder, "state.pt"), map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order = state["order"]

    first = dike.checkpoint(save, restore)
    for step in range(first, arguments.epochs * steps_per_epoch):
        batch = step % steps_per_epoch
        if batch == 0:
            order = torch.randperm(len(images[train]))
        chosen = order[batch * arguments.batch_size : (batch + 1) * arguments.batch_size]
        model.train()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures = {"loss": loss.item()}
        if batch == steps_per_epoch - 1:
            model.eval()
            with torch.no_grad():
                correct = model(images[test]).argmax(dim=1) == labels[test]
            figures["accuracy"] = correct.float().mean().item()
            print(f"step {step + 1}: loss {figures['loss']:.4f}, test accuracy {figures['accuracy']:.4f}", flush=True)
        dike.report(step + 1, **figures)


if __name__ == "__main__":
    main()
