#!/bin/bash
# Kubernetes runs this before it ends a worker's pod, for example when the termination handler of a spot node evicts it:
# Ray places nothing there any more, training saves a checkpoint, and Ray ends when nothing runs there.
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "Kubernetes ends this pod" \
    --deadline-remaining-seconds 110
while pgrep -x raylet > /dev/null; do
    sleep 1
done
