#!/bin/bash
# Starts a command again when it fails; a job resumes where it was: `bash helpers/clusters/until_done.sh papermill ...`.
# Gives up after RESTARTS failures (3) in a row, each within an hour of its start: a wrong parameter fails at once.
# A command that was interrupted or terminated is not started again.
set -u
# By it the next driver knows the lease of the dead one, and takes it over at once.
export PRETRAIN_JOB_ID=${PRETRAIN_JOB_ID:-$(hostname)-$$-$(date +%s)}
failures=0
while true; do
    SECONDS=0
    status=0
    "$@" || status=$?
    case $status in
        0 | 130 | 143) exit $status ;;
    esac
    if ((SECONDS > 3600)); then
        failures=0
    fi
    failures=$((failures + 1))
    if ((failures > ${RESTARTS:-3})); then
        echo "Exit status $status: given up after $failures failures in a row." >&2
        exit $status
    fi
    echo "Exit status $status: the command is started again (failure $failures of ${RESTARTS:-3})." >&2
    sleep "${RESTART_SECONDS:-10}" # the dead driver's processes end meanwhile
done
