"""What is refused or said about a cluster before a job or a run starts."""

from __future__ import annotations

import collections
import contextlib
import uuid
from collections.abc import Sequence

import ray
from ray.util import accelerators
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ... import storage
from ...cluster import is_local_ray
from ...config import PreprocessingConfig, TrainingConfig, pool_size


def check_run(config: TrainingConfig, raw: PreprocessingConfig | None = None) -> None:
    """Check that the cluster has what a run needs; `raw`: the encoders beside it, of an online run."""
    check_shared(config.storage)
    num_encoders = pool_size(raw.num_encoders)["min_size"] if raw else 0
    check_cpus(num_trainers=0 if config.use_gpu else config.most_workers, num_encoders=num_encoders)
    if config.use_gpu:
        options = {"encoder_gpus": num_encoders * raw.gpus_per_encoder if raw else 0}
        options["validates"] = config.extras.get("evaluate", {}) is not None
        check_gpus(config.worker_counts, config.training_accelerator_type, **options)


def check_job(config: PreprocessingConfig) -> None:
    """Check that the cluster has what a preprocessing job needs."""
    check_shared(config.storage)
    check_shared(config.latents_uri, "latents_uri")
    check_cpus(num_encoders=pool_size(config.num_encoders)["min_size"])


def check_cpus(num_trainers: int = 0, num_encoders: int = 0) -> None:
    """Check that trainers and encoders leave a CPU to the tasks that read: without one, all would wait without end.

    Ray Train gives a CPU to a trainer without a GPU, and the notebooks give half of one to an encoder. Raises
    ValueError on a Ray of this machine, where no node will join. Elsewhere prints what is waited for.
    """
    has = sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    taken = num_trainers + num_encoders / 2
    if taken + 1 <= has:
        return
    numbers = {"num_training_workers": num_trainers, "num_encoders": num_encoders}
    names = " and ".join(f"{name}={number}" for name, number in numbers.items() if number)
    sentence = f"{names} take {taken:g} of {has:g} CPUs, and the tasks that read data need one more"
    if is_local_ray():
        raise ValueError(f"{sentence}: use fewer of them, or a machine with more CPUs.")
    print(f"{sentence}: the work starts when nodes with more CPUs have joined.")


def check_shared(uri: str, parameter: str = "storage") -> None:
    """Raises ValueError, naming the `parameter`, if some node does not see what this process writes to `uri`."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    token = storage.join(uri, f".shared-{uuid.uuid4().hex}")
    storage.write_text(token, "")
    exists, seen = ray.remote(num_cpus=0)(storage.exists), {}
    try:
        for node in nodes:
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            seen[node["NodeManagerAddress"]] = exists.options(scheduling_strategy=on_node).remote(token)
        for address, answer in seen.items():
            with contextlib.suppress(ray.exceptions.TaskUnschedulableError):  # the node left after it was listed
                if not ray.get(answer):
                    raise ValueError(
                        f"{parameter}={uri!r} is not shared: the node {address} does not see what is written there. "
                        "Give a folder that all nodes mount, or a URI such as s3://bucket/folder."
                    )
    finally:
        storage.delete(token)


def check_gpus(
    num_trainers: Sequence[int], accelerator_type: str | None = None, *, encoder_gpus: float = 0, validates: bool = True
) -> None:
    """Check the cluster's GPUs for the trainers. Prints a line if there are too few, or none is left for validation.

    Raises ValueError if the trainers may get GPUs of two kinds: all would run at the slower one's speed, and run out of
    memory on the smaller one. Raises ValueError for a kind that no node has and none will: no node joins a Ray on this
    machine, and Ray knows all kinds.

    Args:
        num_trainers: their possible numbers, `TrainingConfig.worker_counts`; each takes a GPU.
        accelerator_type: the trainers' kind of GPU; None: any.
        encoder_gpus: GPUs of all encoders together.
        validates: whether one more GPU could validate beside the training.
    """
    kinds, kind, fewest, most = gpu_kinds(), accelerator_type, min(num_trainers), max(num_trainers)
    counted = ", ".join(f"{count:g} of kind {name}" for name, count in sorted(kinds.items()))
    if kind not in {None, *kinds} and (is_local_ray() or kind not in vars(accelerators).values()):
        raise ValueError(
            f"training_accelerator_type={kind!r}, and the cluster has no GPU of that kind but {counted or 'none'}: "
            "name a kind that it has, or None for any."
        )
    if len(kinds) > 1 and most > 1 and kind is None:
        raise ValueError(
            f"training_accelerator_type=None, and the cluster has GPUs of several kinds ({counted}): trainers on two "
            f"kinds would all go at the pace of the slower; name one, such as {max(kinds, key=kinds.get)!r}."
        )
    if kind and set(kinds) != {kind}:  # the encoders have GPUs of another kind
        kinds, encoder_gpus = {kind: kinds.get(kind, 0)}, 0
    gpus = f"GPUs of kind {kind}" if kind else "GPUs"
    has, least, wanted = sum(kinds.values()), fewest + encoder_gpus, most + encoder_gpus + 1
    if has < least:
        lower = "num_training_workers or num_encoders" if encoder_gpus else "num_training_workers"
        print(
            f"Training wants {least:g} {gpus}, {encoder_gpus:g} of them for encoders, and the cluster has {has:g}: "
            f"the run starts when nodes with the others have joined. If none will, set {lower} lower."
        )
    elif validates and has < wanted:
        print(
            f"Training and its validation want {wanted:g} {gpus}, one of them for validation, and the cluster has "
            f"{has:g}: the trainers stop to validate. Add a GPU to validate beside them."
        )


def gpu_kinds() -> dict[str, float]:
    """{accelerator type, as Ray calls it: number of GPUs} of the cluster's nodes."""
    kinds = collections.Counter()
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("GPU"):
            names = [name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")]
            kinds["/".join(sorted(names)) or "unknown"] += node["Resources"]["GPU"]
    return kinds
