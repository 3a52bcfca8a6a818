"""The files that start a cluster, against the schemas of Ray's launcher and of KubeRay, and against the profiles."""

import copy
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml
from ray.autoscaler._private import util
from ray.autoscaler.v2.instance_manager.config import FileConfigReader
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.instance_manager_pb2 import Instance, InstanceUpdateEvent

from helpers.lesson import full_run
from tests.processes import DYING_DRIVER

ROOT = pathlib.Path(__file__).parents[2]
CLUSTERS = ROOT / "helpers" / "clusters"
KUBERAY = ["kuberay-cluster.yaml", "kuberay-job.yaml"]


def read(name):
    return yaml.safe_load((CLUSTERS / name).read_text())


def closed(schema):
    """A Kubernetes schema in which what it does not list is an error, as `kubectl --validate=strict` has it."""
    if isinstance(schema, dict):
        closed_schema = {name: closed(value) for name, value in schema.items()}
        if "properties" in schema and "additionalProperties" not in schema:
            closed_schema["additionalProperties"] = False
        return closed_schema
    return [closed(value) for value in schema] if isinstance(schema, list) else schema


@pytest.fixture(scope="module")
def schemas():
    """{kind: schema} of KubeRay's resources."""
    found = closed(yaml.safe_load((pathlib.Path(__file__).parent / "kuberay_crds.yaml").read_text()))
    cluster = found["RayCluster"]["properties"]["spec"]
    found["RayJob"]["properties"]["spec"]["properties"]["rayClusterSpec"] = cluster
    for schema in found.values():
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return found


# ---- Ray's cluster launcher


def test_the_aws_file_is_what_rays_launcher_takes():
    util.validate_config(util.prepare_config(read("aws.yaml")))
    misspelt = read("aws.yaml")
    misspelt["docker"]["images"] = "a"
    with pytest.raises(jsonschema.ValidationError):
        util.validate_config(util.prepare_config(misspelt))


def test_all_aws_nodes_are_in_one_network():
    """Ray's launcher wants a node's subnet and security groups on the node, or on each of its interfaces."""
    nodes = {name: kind["node_config"] for name, kind in read("aws.yaml")["available_node_types"].items()}
    efa = nodes["trainers"].pop("NetworkInterfaces")
    assert not {"SubnetIds", "SubnetId", "SecurityGroupIds"} & set(nodes["trainers"])
    for place in [*efa, nodes["head"], nodes["encoders"], nodes["encoders-on-demand"]]:
        assert place.get("SubnetId") == "subnet-0123" or place["SubnetIds"] == ["subnet-0123"]
        assert place.get("Groups", place.get("SecurityGroupIds")) == ["sg-0123"]
    assert [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in efa] == [(0, 0), (1, 1), (2, 1), (3, 1)]
    assert {card["InterfaceType"] for card in efa} == {"efa"} and nodes["trainers"]["Placement"]


@pytest.mark.parametrize("resolution", full_run.PARAMETERS)
def test_the_clusters_hold_the_full_runs_workers(resolution):
    full, aws = full_run.PARAMETERS[resolution], read("aws.yaml")["available_node_types"]
    assert aws["trainers"]["node_config"]["InstanceType"] == "p4de.24xlarge"  # 8 A100-80G
    assert aws["encoders"]["node_config"]["InstanceType"] == "g5.2xlarge"  # an A10G
    for kind, accelerator, needed in (
        ("trainers", full["training_accelerator_type"], full["num_training_workers"]),
        ("encoders", full["encoder_accelerator_type"], full["num_encoders"]),
    ):
        assert f"accelerator_type:{accelerator}" in aws[kind]["resources"]
        assert aws[kind]["max_workers"] * aws[kind]["resources"]["GPU"] >= needed
    assert read("aws.yaml")["max_workers"] >= sum(aws[kind]["max_workers"] for kind in ("trainers", "encoders"))
    assert aws["encoders-on-demand"]["resources"] == aws["encoders"]["resources"]
    for group in read("kuberay-cluster.yaml")["spec"]["workerGroupSpecs"]:
        kind = {"trainers": "training_accelerator_type", "encoders": "encoder_accelerator_type"}[group["groupName"]]
        assert json.loads(json.loads(f'"{group["rayStartParams"]["resources"][1:-1]}"')) == {
            f"accelerator_type:{full[kind]}": 1
        }
        gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        needed = {"trainers": "num_training_workers", "encoders": "num_encoders"}[group["groupName"]]
        assert gpus * group["maxReplicas"] >= full[needed]
    options = re.findall(r"--nodes=(\d+) .*--gpus-per-node=(\d+)", (CLUSTERS / "slurm.sh").read_text())
    trainers, encoders = (int(nodes) * int(gpus) for nodes, gpus in options)
    assert trainers >= full["num_training_workers"] and encoders >= full["num_encoders"]


@pytest.mark.parametrize(
    ("encoders", "seen", "launched"),
    [
        (62, None, {"encoders": 58, "encoders-on-demand": 4}),
        # Why the file tells people to lower max_workers of the spot instances: a refused launch changes nothing.
        (40, Instance.ALLOCATION_FAILED, {"encoders": 40}),
        (40, Instance.ALLOCATION_TIMEOUT, {"encoders-on-demand": 40}),
    ],
)
def test_encoders_are_spot_instances_and_the_rest_is_on_demand(encoders, seen, launched):
    """What Ray's own scheduler launches for so many encoders, after it has seen something of spot instances."""
    nodes, monitor = (
        FileConfigReader(str(CLUSTERS / "aws.yaml")).get_cached_autoscaling_config(),
        CloudResourceMonitor(),
    )
    monitor.notify([InstanceUpdateEvent(instance_type="encoders", new_instance_status=seen)] if seen else [])
    wanted = ResourceRequestUtil.make({"GPU": 1, "accelerator_type:A10G": 0.001})
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=nodes.get_node_type_configs(),
        max_num_nodes=nodes.get_max_num_worker_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([wanted] * encoders),
        recoverable_resource_availabilities=monitor.get_recoverable_resource_availabilities(),
    )
    asked = {launch.instance_type: launch.count for launch in ResourceDemandScheduler(None).schedule(request).to_launch}
    assert asked == launched


def test_each_aws_worker_watches_for_its_interruption_and_spills_to_its_own_disks():
    *_, start, watch = read("aws.yaml")["worker_start_ray_commands"]
    folder, module = re.fullmatch(r"cd (\S+); nohup setsid python -m (\S+) > .* &", watch).groups()
    assert importlib.util.find_spec(module) and f"WORKDIR {folder}\n" in (CLUSTERS / "Dockerfile").read_text()
    # Ray spills to a folder of the instance's own disks, which its container sees.
    assert re.search(r"ray start --address=\S+ --object-spilling-directory=/spill$", start)
    assert read("aws.yaml")["docker"]["run_options"] == ["-v /opt/dlami/nvme/spill:/spill"]


# ---- a driver that fails


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


# ---- KubeRay


@pytest.mark.parametrize("name", KUBERAY)
def test_the_kubernetes_files_are_what_kuberay_takes(name, schemas):
    resource = read(name)
    jsonschema.validate(resource, schemas[resource["kind"]])
    assert resource["apiVersion"] == "ray.io/v1"
    misspelt = copy.deepcopy(resource)
    misspelt["spec"].get("rayClusterSpec", misspelt["spec"])["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(misspelt, schemas[resource["kind"]])


def test_the_job_runs_on_the_cluster_of_the_other_file():
    assert read("kuberay-job.yaml")["spec"]["rayClusterSpec"] == read("kuberay-cluster.yaml")["spec"]


def test_the_jobs_command_is_a_profiles():
    words = read("kuberay-job.yaml")["spec"]["entrypoint"].split()
    assert words[3].startswith("PRETRAIN_JOB_ID=") and words[4] == "bash" and words[6] == "papermill"
    assert (ROOT / words[5]).is_file() and (ROOT / words[7]).is_file()
    for group in read("kuberay-cluster.yaml")["spec"]["workerGroupSpecs"]:
        _, script = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (ROOT / script).is_file()
    assert (ROOT / words[words.index("-f") + 1]).is_file()


# ---- all


def test_every_file_has_the_pinned_ray():
    (ray_version,) = re.findall(r"^ray\[data,train\]==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    dockerfile = (CLUSTERS / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{ray_version}-py3" in dockerfile and f'"ray[default]=={ray_version}"' in dockerfile
    assert read("kuberay-cluster.yaml")["spec"]["rayVersion"] == ray_version


def test_the_image_holds_what_the_jobs_command_needs():
    """What the Dockerfile copies is there, and where the job changes to."""
    dockerfile = (CLUSTERS / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (?:--\S+ )?(\S+) ", dockerfile, re.MULTILINE):
        assert list(ROOT.glob(source)), source
    (folder,) = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)
    assert f"cd {folder} " in read("kuberay-job.yaml")["spec"]["entrypoint"]
    assert "efa_installer.sh" in dockerfile


def test_dashboards_listen_on_private_addresses():
    """A pod's own address is one; its service must not be seen from outside."""
    for name in ("aws.yaml", "slurm.sh"):
        found = re.findall(r"--dashboard-host=(\S+)", (CLUSTERS / name).read_text())
        assert found and "0.0.0.0" not in found, name
    assert read("kuberay-cluster.yaml")["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_asks_for_a_command():
    done = subprocess.run(["bash", CLUSTERS / "slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and "Give the command to run on the cluster" in done.stderr
