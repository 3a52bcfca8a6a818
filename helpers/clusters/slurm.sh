#!/bin/bash
# One Ray cluster in a Slurm job, and a command on its head node:
#   sbatch helpers/clusters/slurm.sh papermill Training.ipynb executed/Training.ipynb \
#       -f helpers/profiles/full-sd2-256.yaml -p storage /shared/sd2
# Trainers are the first component of a heterogeneous job, encoders the second; without the second (`hetjob` and the
# line below it deleted), both are on the same nodes. `--nodes` is what full-sd2-256 asks for; README.md has the numbers
# of the other profiles. The Python environment must be active, and on all nodes.
# Slurm queues the job again when a node fails, and this script does when the command fails: up to REQUEUES times (3).
#SBATCH --requeue --open-mode=append
#SBATCH --job-name=sd2 --partition=a100 --nodes=4 --ntasks-per-node=1 --exclusive --gpus-per-node=8
#SBATCH hetjob
#SBATCH --partition=a10g --nodes=58 --ntasks-per-node=1 --exclusive --gpus-per-node=1
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "Give the command to run on the cluster: sbatch $0 papermill ..." >&2
    exit 2
fi
# This script runs on the first node of the first component, which is Ray's head. Other nodes reach it, and the
# dashboard listens, on its private address.
head_ip=$(hostname -I | cut -d' ' -f1)
export RAY_ADDRESS=$head_ip:${RAY_PORT:-6379}
# Whoever reaches Ray can run code: a token of this job's own, which srun passes on with the environment.
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex())")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
export RAY_TMPDIR=${RAY_TMPDIR:-/tmp}  # for sockets, whose paths have at most 107 characters
# Ray spills below a folder that only its user reads, on each node: it opens the one that it is given to everybody.
spill=${TMPDIR:-/tmp}/ray-spill-$(id -u)
# By it a requeued job knows the lease of its own dead driver, and takes it over at once.
if [ -n "${SLURM_JOB_ID:-}" ]; then
    export PRETRAIN_JOB_ID=${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID
fi
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

wait_for_nodes() {
    python - "$1" "${RAY_WAIT_SECONDS:-600}" <<'EOF'
import sys
import time

import ray

total, wait = map(int, sys.argv[1:])
alive, deadline = 0, time.monotonic() + wait
while alive < total:
    if time.monotonic() > deadline:
        sys.exit(f"{alive} of {total} nodes joined Ray within {wait} seconds: see the output of `ray start` above.")
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
        alive = sum(node["Alive"] for node in ray.nodes())
    except (ConnectionError, RuntimeError, ray.exceptions.RayError):  # the head is starting
        pass
    time.sleep(1)
print(f"{alive} Ray nodes at {ray.get_runtime_context().gcs_address}", flush=True)
EOF
}

install -d -m 700 "$spill"
ray start --head --block --node-ip-address="$head_ip" --port="${RAY_ADDRESS##*:}" --dashboard-host="$head_ip" \
    --object-spilling-directory="$spill/ray" --disable-usage-stats &
wait_for_nodes 1
total=0
for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
    nodes=SLURM_JOB_NUM_NODES_HET_GROUP_$group
    nodes=${!nodes:-$SLURM_JOB_NUM_NODES}
    total=$((total + nodes))
    options=(--ntasks-per-node=1)
    if [ -n "${SLURM_HET_SIZE:-}" ]; then
        options+=(--het-group="$group")
    fi
    if [ "$group" -eq 0 ]; then
        nodes=$((nodes - 1))
        options+=(--exclude="$SLURMD_NODENAME")
    fi
    if [ "$nodes" -gt 0 ]; then
        srun "${options[@]}" --nodes="$nodes" --ntasks="$nodes" --kill-on-bad-exit=0 \
            bash -c 'install -d -m 700 "$0" && exec ray start --object-spilling-directory="$0/ray" "$@"' "$spill" \
            --address="$RAY_ADDRESS" --block --disable-usage-stats &
    fi
done

wait_for_nodes "$total"
status=0
"$@" || status=$?
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$status" -ne 0 ] && [ -n "${SLURM_JOB_ID:-}" ] && [ "$restarts" -lt "${REQUEUES:-3}" ]; then
    echo "Exit status $status: the job is queued again, for the next of at most ${REQUEUES:-3} restarts." >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
