"""A fake executor whose tasks end immediately, so that load tests measure the service and Mesos, not the scripts.

It implements the v1 executor API without a library and imports little, as thousands of it run. A parameter server runs
until it is killed; other tasks report `RUNNING` several times and finish, or with the argument `forever` run until
killed. The executor exits after its last task.
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
    """Posts a call; returns the connection."""
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
    """Yields the events of a subscription (RecordIO: length and JSON in each HTTP chunk)."""
    stream = connection.makefile("rb")
    while stream.readline().strip():
        pass
    while size := int(stream.readline() or b"0", 16):
        record = stream.read(size + 2)
        yield json.loads(record.partition(b"\n")[2])


def update(task_id, state, message):
    """Sends a status update and waits for the agent's response."""
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
