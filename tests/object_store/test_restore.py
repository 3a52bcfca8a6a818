"""Workers that resume from a checkpoint in an object store."""

import pytest

from helpers.train import metrics, resume
from tests.pipelines import draw_and_encode, fit, short_run


@pytest.mark.slow
def test_resuming_workers_of_a_node_download_once(store, cluster):
    """So do those of a run that continues another. A resuming run first checks its checkpoint."""

    def downloads():
        return [path for method, path in store.requests if method == "GET" and ".distcp" in path and "restore" in path]

    data = draw_and_encode("s3://bucket/restore", 200)
    values = {"num_training_workers": 2, "max_steps": 2, "checkpoint_every": 2, "warmup_steps": 1}
    first = short_run(data, "first", **values)
    fit(first)
    assert downloads() == [] and resume.last_step(first) == 2
    fit(first)
    written = downloads()
    assert len(set(written)) == 2 and len(written) == 4  # a file of each worker: checked, then downloaded
    assert len(metrics.read_metrics(first.run_uri, all_attempts=True)) == 2  # it was finished
    second = short_run(data, "second", continue_from="first@2", **{**values, "max_steps": 3})
    fit(second)
    assert sorted(downloads()) == sorted([*written, *set(written)])
    assert metrics.read_metrics(second.run_uri)["step"].tolist() == [3]
