"""The files that start a cluster, against the schemas of what reads them, and against the profiles."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml
from ray.autoscaler._private import util

from helpers.lesson import full_run
from tests.processes import DYING_DRIVER

ROOT = pathlib.Path(__file__).parents[2]
CLUSTERS = ROOT / "helpers" / "clusters"
TEXTS = {path.name: path.read_text() for path in CLUSTERS.iterdir()}
AWS, GCP = (yaml.safe_load(TEXTS[name]) for name in ("aws.yaml", "gcp.yaml"))
MONITOR, SKY = (yaml.safe_load(TEXTS[name]) for name in ("podmonitor.yaml", "sky.yaml"))
NODES = AWS["available_node_types"]
DOCUMENTS = [list(yaml.safe_load_all(TEXTS[name])) for name in ("kuberay-cluster.yaml", "kuberay-job.yaml")]
KUBERAY = [resource for _, resource in DOCUMENTS]
POLICY = DOCUMENTS[0][0]
GROUPS = {group["groupName"]: group for group in KUBERAY[0]["spec"]["workerGroupSpecs"]}


def container(group):
    return group["template"]["spec"]["containers"][0]


# ---- against what reads them


@pytest.mark.parametrize("file", [AWS, GCP], ids=["aws", "gcp"])
def test_the_file_of_a_cloud_is_what_rays_launcher_takes(file):
    util.validate_config(util.prepare_config(copy.deepcopy(file)))
    with pytest.raises(jsonschema.ValidationError):  # misspelt
        util.validate_config(util.prepare_config({**file, "docker": {**file["docker"], "images": "a"}}))


def closed(schema):
    """A Kubernetes schema in which what it does not list is an error, as `kubectl --validate=strict` has it."""
    if isinstance(schema, list):
        return [closed(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {"additionalProperties": False} if "properties" in schema else {}
    return {**strict, **{name: closed(value) for name, value in schema.items()}}


def test_the_kubernetes_files_are_what_kuberay_takes_and_describe_one_cluster():
    schemas = closed(yaml.safe_load((ROOT / "tests/unit/kuberay_crds.yaml").read_text()))
    properties = {kind: schema["properties"] for kind, schema in schemas.items()}
    properties["RayJob"]["spec"]["properties"]["rayClusterSpec"] = properties["RayCluster"]["spec"]
    for resource in [POLICY, *KUBERAY]:
        properties[resource["kind"]]["metadata"] = {"type": "object", "required": ["name"]}
        jsonschema.validate(resource, schemas[resource["kind"]])
    with pytest.raises(jsonschema.ValidationError):  # misspelt
        jsonschema.validate({**KUBERAY[0], "spec": {**KUBERAY[0]["spec"], "head": {}}}, schemas["RayCluster"])
    assert KUBERAY[1]["spec"]["rayClusterSpec"] == KUBERAY[0]["spec"] and DOCUMENTS[1][0] == POLICY


@pytest.mark.parametrize(("kind", "file"), [("PodMonitor", MONITOR), ("SkyPilot", SKY)], ids=["Prometheus", "SkyPilot"])
def test_the_files_for_prometheus_and_skypilot_are_what_these_take(kind, file):
    schema = closed(yaml.safe_load((ROOT / "tests/unit/launcher_schemas.yaml").read_text()))[kind]
    jsonschema.validate(file, schema)
    with pytest.raises(jsonschema.ValidationError):  # misspelt
        jsonschema.validate({**file, "speck": {}}, schema)


# ---- against the profiles


# {kind of machines in the files: (what a profile says of them, GPU, AWS's name)}
TRAINERS, ENCODERS = (
    ("num_training_workers", "training_accelerator_type"),
    ("num_encoders", "encoder_accelerator_type"),
)
ROLES = {
    "trainers": (*TRAINERS, "A100", "p4de.24xlarge"),
    "encoders": (*ENCODERS, "A10G", "g5.2xlarge"),
    "trainers-h100": (*TRAINERS, "H100", "p5.48xlarge"),
    "encoders-l40s": (*ENCODERS, "L40S", "g6e.2xlarge"),
}
PROFILES = {path.stem: full_run.read_profile(path.stem) for path in full_run.PROFILES.glob("*.yaml")}
ON_CLUSTERS = {name: profile for name, profile in PROFILES.items() if profile["ray_address"] == "auto"}


def machines_of(profile):
    """{role: number of its machines} that a profile asks for."""
    roles = {role: count for role, (count, kind, gpu, _) in ROLES.items() if profile[kind] == gpu}
    asked = {role: profile[count] / NODES[role]["resources"]["GPU"] for role, count in roles.items()}
    assert all(number == int(number) for number in asked.values()), "a machine that is used in part"
    return {role: int(number) for role, number in asked.items()}


@pytest.mark.parametrize("role", ROLES)
def test_the_clusters_hold_the_machines_that_the_largest_profile_asks_for(role):
    """And 128 trainers, as MosaicML had."""
    *_, accelerator, instances = ROLES[role]
    node, pods = NODES[role], GROUPS[role]
    most = max(machines_of(profile).get(role, 0) for profile in ON_CLUSTERS.values())
    assert len(ON_CLUSTERS) == 6 and node["node_config"]["InstanceType"] == instances
    assert node["resources"][f"accelerator_type:{accelerator}"] == 1
    assert pods["rayStartParams"]["resources"] == json.dumps(json.dumps({f"accelerator_type:{accelerator}": 1}))
    assert container(pods)["resources"]["limits"]["nvidia.com/gpu"] == node["resources"]["GPU"]
    assert node["max_workers"] == pods["maxReplicas"] >= most > 0
    assert "trainers" not in role or node["max_workers"] * node["resources"]["GPU"] == 128
    assert AWS["max_workers"] == sum(NODES[name]["max_workers"] for name in ROLES)


# ---- against the image and each other


def test_the_image_holds_what_the_jobs_command_needs():
    (folder,) = re.findall(r"^WORKDIR (\S+)$", TEXTS["Dockerfile"], re.MULTILINE)
    command = KUBERAY[1]["spec"]["entrypoint"]
    assert command.startswith(f"cd {folder} && PRETRAIN_JOB_ID=") and "efa_installer.sh" in TEXTS["Dockerfile"]
    copied = re.findall(r"^COPY (?:--\S+ )?(\S+) ", TEXTS["Dockerfile"], re.MULTILINE)
    named = re.findall(r"(?<= )\w[\w/-]+\.(?:ipynb|yaml|sh)", command)
    hooks = [container(group)["lifecycle"]["preStop"]["exec"]["command"][1] for group in GROUPS.values()]
    for path in [*copied, *named, *hooks]:
        assert list(ROOT.glob(path)), path
    assert len(named) == 3


@pytest.mark.parametrize("checksum", ["", "0123"], ids=["without its checksum", "with it"])
def test_the_image_has_efa_if_the_checksum_of_its_installer_is_given(checksum):
    (begin,) = re.findall(r"^RUN (if .*EFA_SHA256.* fi) ", TEXTS["Dockerfile"], re.MULTILINE)
    variables = {**os.environ, "EFA_SHA256": checksum}
    command = ["bash", "-c", f"{begin} && echo installs"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ("installs" in done.stdout) == bool(checksum) != ("an image without EFA" in done.stdout)


def test_every_file_has_the_pinned_ray():
    (version,) = re.findall(r"^ray\[data,train\]==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert f"FROM rayproject/ray:{version}-py3" in TEXTS["Dockerfile"]
    assert f'"ray[default]=={version}"' in TEXTS["Dockerfile"]
    assert KUBERAY[0]["spec"]["rayVersion"] == version


def test_dashboards_listen_on_private_addresses():
    """A pod's own address is one; its service must not be seen from outside."""
    for name in ("aws.yaml", "gcp.yaml", "slurm.sh"):
        found = re.findall(r"--dashboard-host=(\S+)", TEXTS[name])
        assert found and "0.0.0.0" not in found, name
    assert KUBERAY[0]["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"


# ---- who gets in, and what the machines may do


def test_every_cluster_asks_for_a_token():
    """`tests/cluster/test_access.py` shows what Ray refuses without it."""
    assert "-e RAY_AUTH_MODE=token" in AWS["docker"]["run_options"]
    assert AWS["file_mounts"] == GCP["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/sd2_token"}
    assert "-e RAY_AUTH_MODE=token" in GCP["docker"]["run_options"]
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$TOKEN" in SKY["run"]
    assert KUBERAY[0]["spec"]["authOptions"] == {"mode": "token"}
    assert "export RAY_AUTH_TOKEN RAY_AUTH_MODE=token" in TEXTS["slurm.sh"]


def test_pods_run_as_a_user_without_rights_that_only_the_cluster_reaches():
    spec = KUBERAY[0]["spec"]
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    inside, dashboard, _ = POLICY["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": POLICY["spec"]["podSelector"]}]}
    assert dashboard["ports"] == [{"port": 8265}] and all("podSelector" in peer for peer in dashboard["from"])
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for group in [spec["headGroupSpec"], *GROUPS.values()]:
        template, pod = group["template"], group["template"]["spec"]
        assert template["metadata"]["labels"] == POLICY["spec"]["podSelector"]["matchLabels"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert container(group)["securityContext"] == spec["autoscalerOptions"]["securityContext"] == rights
        assert group is spec["headGroupSpec"] or pod["automountServiceAccountToken"] is False


# ---- the scripts


@pytest.mark.parametrize(
    ("killed_until", "last_status", "starts", "status"),
    [(3, 0, 3, 0), (9, 0, 3, 137), (1, 143, 1, 143)],
    ids=["a killed driver is started again", "until it has failed three times", "an interrupted one is not"],
)
def test_a_driver_that_dies_is_started_again(tmp_path, killed_until, last_status, starts, status):
    """Each driver takes the lease of the one before it over at once, by the same PRETRAIN_JOB_ID."""
    command = [sys.executable, "-c", DYING_DRIVER, str(tmp_path), str(killed_until), str(last_status)]
    variables = {**os.environ, "RESTARTS": "2", "RESTART_SECONDS": "0"}
    variables.pop("PRETRAIN_JOB_ID", None)
    done = subprocess.run(
        ["bash", CLUSTERS / "until_done.sh", *command], env=variables, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == status and "Waiting" not in done.stdout
    ids = (tmp_path / "starts").read_text().split()
    assert len(ids) == starts and len(set(ids)) == 1
    assert ("given up after 3 failures in a row" in done.stderr) == (status == 137)
