"""Each profile on simulated nodes that carry the accelerators' names: where its encoders and trainers are placed.

What a profile asks for is taken from the notebooks' cells, with the profile's values. The full counts are placed as the
bundles of a placement group, which stand for the actors without a process each.
"""

import types

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder
from helpers.lesson import full_run
from helpers.production.extras import evaluate
from tests.faults import add_node, slow, wait_until
from tests.pipelines import PREPROCESSING, TRAINING, from_notebook, profile_with_commits, stand_in

PROFILES = sorted(path.stem for path in full_run.PROFILES.glob("*.yaml"))
FULL = [name for name in PROFILES if name.startswith("full-")]
A100_NODES, A10GS = 4, 124  # p4de.24xlarge; as many g5.2xlarge, here as one node


def encoder_requests(profile):
    """Resources of each encoder, as `pipeline` of Preprocessing.ipynb asks Ray Data for them."""
    calls = []

    class Rows:
        def map_batches(self, function, **options):
            calls.append((function, options))
            return self

    pipeline = from_notebook(
        PREPROCESSING,
        "pipeline",
        job=types.SimpleNamespace(
            config=PreprocessingConfig.from_parameters(profile),
            write_arguments=lambda segment: {},
            rows_per_file=1024,
        ),
        inputs=types.SimpleNamespace(read_rows=lambda segment, config: Rows()),
        prepare=types.SimpleNamespace(encoder_arguments=lambda config: {}),
    )
    pipeline(None)
    (options,) = [options for function, options in calls if function is encoder.LatentEncoder]
    kind, gpus = options["accelerator_type"], options["num_gpus"] or 0
    request = {"CPU": options["num_cpus"], "GPU": gpus, **({f"accelerator_type:{kind}": 0.001} if kind else {})}
    return [{name: value for name, value in request.items() if value}] * options["compute"].max_size


def trainer_requests(profile):
    """Resources of each training worker, as `build_trainer` of Training.ipynb asks Ray Train for them."""
    asked = []

    def trainer(loop, *, scaling_config, **options):
        asked.append(scaling_config)

    config = TrainingConfig.from_parameters(profile)
    build = from_notebook(
        TRAINING,
        "build_trainer",
        config=config,
        TorchTrainer=trainer,
        ScalingConfig=ScalingConfig,
        execution_options=lambda *_: None,
        StepSource=lambda config: types.SimpleNamespace(data=types.SimpleNamespace(row_bytes=1), datasets=None),
        validation=stand_in(evaluate, validation_config=lambda *_: None),
        **{"test_prompts": None, "detector": None},
        **{name: profile.get(name) for name in ("use_gpu", "training_accelerator_type")},
    )
    build(config)
    (scaling,) = asked
    request = {name: value for name, value in scaling._resources_per_worker_not_none.items() if value}
    return [request] * scaling.num_workers


def place(requests):
    """The node id of each request, all of them reserved at the same time."""
    group = placement_group(requests)
    assert group.wait(60), "the requests do not fit the cluster"
    placed = placement_group_table(group)["bundles_to_node_id"]
    remove_placement_group(group)
    return [placed[number] for number in range(len(requests))]


@slow
def test_profiles_are_placed_as_they_say(nodes, tmp_path):
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # not to be placed on a node just lost
    small = dict(object_store_memory=80_000_000)
    a100 = dict(num_cpus=96, num_gpus=8, resources={"accelerator_type:A100": 1}, **small)
    a10g = dict(num_cpus=8 * A10GS, num_gpus=A10GS, resources={"accelerator_type:A10G": 1}, **small)
    kinds = {add_node(nodes, **a100).node_id: "A100" for _ in range(A100_NODES)}
    kinds[add_node(nodes, **a10g).node_id] = "A10G"
    for name in PROFILES:
        profile = {**profile_with_commits(name), "storage": str(tmp_path), "input_uri": ""}
        encoders, trainers = encoder_requests(profile), trainer_requests(profile)
        assert (len(encoders), len(trainers)) == (profile["num_encoders"], profile["num_training_workers"]), name
        together = [encoders + trainers] if name in ("laptop", *FULL) else [encoders, trainers]
        places = [node for requests in together for node in place(requests)]
        wanted = [profile.get("encoder_accelerator_type")] * len(encoders)
        wanted += [profile.get("training_accelerator_type")] * len(trainers)
        for node, kind, request in zip(places, wanted, encoders + trainers, strict=True):
            assert kind is None or kinds[node] == kind, name
            assert "GPU" not in request or node in kinds, name
        gpus = [sum(request.get("GPU", 0) for request in requests) for requests in together]
        assert max(gpus) <= {"laptop": 0, "one-gpu": 1, "8xa100": 8}.get(name, 8 * A100_NODES + A10GS), name
