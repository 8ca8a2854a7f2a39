"""An executor whose tasks are over at once: with it a load test measures the service and Mesos, not a thousand scripts.

It speaks Mesos' v1 executor API by itself and imports next to nothing, as there are thousands of it. It takes any
number of tasks. A parameter server runs until it is killed; any other task says `RUNNING` a few times and finishes.
With an argument, `forever`, all run until they are killed. It ends when its last task has.
"""

import base64
import json
import os
import socket
import sys
import uuid

RUNNING_UPDATES = 6
ENDPOINT = os.environ["MESOS_AGENT_ENDPOINT"]
IDS = {
    "framework_id": {"value": os.environ["MESOS_FRAMEWORK_ID"]},
    "executor_id": {"value": os.environ["MESOS_EXECUTOR_ID"]},
}


def connect(call):
    """Posts a call; returns its connection."""
    host, _, port = ENDPOINT.rpartition(":")
    body = json.dumps({**IDS, **call}).encode()
    head = (
        f"POST /api/v1/executor HTTP/1.1\r\nHost: {ENDPOINT}\r\nContent-Type: application/json\r\n"
        f"Accept: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    return connection


def events(connection):
    """The events of a subscription: each is one chunk of the answer, a length and JSON on two lines."""
    stream = connection.makefile("rb")
    while stream.readline().strip():
        pass
    while size := int(stream.readline() or b"0", 16):
        record = stream.read(size + 2)
        yield json.loads(record.partition(b"\n")[2])


def update(task_id, state, message):
    """Sends a status update and waits for the agent's answer."""
    status = {
        "task_id": {"value": task_id},
        "executor_id": IDS["executor_id"],
        "state": state,
        "source": "SOURCE_EXECUTOR",
        "uuid": base64.b64encode(uuid.uuid4().bytes).decode(),
        "message": message,
    }
    with connect({"type": "UPDATE", "update": {"status": status}}) as connection:
        connection.recv(1024)


def main():
    """Runs tasks until none is left."""
    tasks = set()
    left = 0
    for event in events(connect({"type": "SUBSCRIBE", "subscribe": {}})):
        kind = event["type"]
        if kind == "LAUNCH":
            task_id = event["launch"]["task"]["task_id"]["value"]
            tasks.add(task_id)
            update(task_id, "TASK_STARTING", "starting")
            for number in range(RUNNING_UPDATES):
                update(task_id, "TASK_RUNNING", f"running, {number}")
            left += 1 + RUNNING_UPDATES
            if ".ps-" not in task_id and "forever" not in sys.argv:
                tasks.remove(task_id)
                update(task_id, "TASK_FINISHED", "finished")
                left += 1
        elif kind == "KILL" and event["kill"]["task_id"]["value"] in tasks:
            task_id = event["kill"]["task_id"]["value"]
            tasks.remove(task_id)
            update(task_id, "TASK_KILLED", "killed")
            left += 1
        elif kind == "ACKNOWLEDGED":
            left -= 1
            if not tasks and left == 0:
                return
        elif kind == "SHUTDOWN":
            return


main()
