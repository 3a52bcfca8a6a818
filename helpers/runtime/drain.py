"""Take a node out of Ray before it is lost: a spot instance that AWS is about to reclaim, or a machine that is sick.

python -m helpers.runtime.drain     # on each node: waits until AWS announces an interruption, then drains the node
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

# EC2's metadata service, which answers on the instance alone: never through a proxy.
SERVICE = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def drain_node(reason: str, seconds: int | None = None, node_id: str | None = None, address: str | None = None) -> None:
    """Tell Ray that a node will go: it places nothing there any more, and Ray Train's workers get a preemption notice.

    Ray on that node ends as soon as nothing runs there.

    Args:
        reason: what Ray's state and its dashboard show.
        seconds: until the node is gone; None: not known.
        node_id: in hex; None: the node that this runs on.
        address: of the cluster; None: the one of this node, or RAY_ADDRESS.

    Raises RuntimeError, with Ray's message, if Ray does not accept it.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    options = {"reason-message": reason, "deadline-remaining-seconds": seconds, "node-id": node_id, "address": address}
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Ray did not drain the node: {(done.stderr or done.stdout).strip()[-500:]}")


def spot_notice() -> datetime.datetime | None:
    """When AWS will interrupt this instance; None if it has not announced that. Raises OSError without an answer."""
    token = urllib.request.Request(f"{SERVICE}/latest/api/token", method="PUT")
    token.add_header("X-aws-ec2-metadata-token-ttl-seconds", "60")
    with open_url(token, timeout=2) as answer:
        headers = {"X-aws-ec2-metadata-token": answer.read().decode()}
    notice = urllib.request.Request(f"{SERVICE}/latest/meta-data/spot/instance-action", headers=headers)
    try:
        with open_url(notice, timeout=2) as answer:
            return datetime.datetime.fromisoformat(json.load(answer)["time"])
    except urllib.error.HTTPError as error:
        if error.code == 404:  # no interruption is announced
            return None
        raise


def watch(node_id: str | None = None, every: float = 5.0) -> None:
    """Wait for the notice, which comes two minutes before the interruption, and drain the node once."""
    last_problem = None
    while True:
        try:
            if end := spot_notice():
                seconds = max(0, int((end - datetime.datetime.now(datetime.UTC)).total_seconds()))
                drain_node(f"AWS interrupts this spot instance at {end}", seconds, node_id)
                return print(f"AWS interrupts this instance in {seconds} s: its node is drained.", flush=True)
        except (OSError, RuntimeError) as error:  # tried again: the service and Ray may be away for a while
            if str(error) != last_problem:
                print(f"Watching for an interruption: {error}", flush=True)
            last_problem = str(error)
        time.sleep(every)


if __name__ == "__main__":
    watch(*sys.argv[1:])
