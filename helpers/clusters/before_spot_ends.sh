#!/bin/bash
# Runs on each EC2 worker until AWS announces that it ends this spot instance, two minutes ahead, and drains the node:
# Ray places nothing there any more, training saves a checkpoint, and Ray ends when nothing runs there. On demand, that
# never comes. Arguments are passed to `ray drain-node`.
service=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}/latest
ask() { curl --fail --silent --noproxy '*' --max-time 2 "$@"; }
until token=$(ask -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$service/api/token") &&
    ask -H "X-aws-ec2-metadata-token: $token" "$service/meta-data/spot/instance-action" &&
    ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "AWS ends this spot instance" \
        --deadline-remaining-seconds 110 "$@"; do
    sleep 5
done
