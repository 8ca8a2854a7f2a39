"""A slot in a process of its own: `python slot_process.py SANDBOX ORDER ZYGOTE...`.

Standard input, a line each: `wanted BASE64`, `kill SECONDS`. Standard output, a JSON object a line: what the slot tells
its driver, and at last how its task ended.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

from executor.channel import TaskChannel
from executor.trial_messages import SlotOrder
from executor.trial_slot import TrialSlot


class Edge:
    """Stands where Mesos' driver would."""

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        self.write({"update": status})

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        self.write({"message": data})

    @staticmethod
    def write(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def obey(slot: TrialSlot) -> None:
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "wanted":
            slot.told(rest)
        else:
            slot.kill(float(rest))


def main() -> None:
    sandbox, order, *zygote = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    channel = TaskChannel(Edge(), "slot-task", Path(sandbox))
    slot = TrialSlot(channel, SlotOrder.decode(order), zygote)
    threading.Thread(target=obey, args=(slot,), daemon=True).start()
    end = slot.run()
    channel.update(end.state, end.message, end.data)


if __name__ == "__main__":
    main()
