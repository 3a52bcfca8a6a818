"""No secret leaves this process's environment, while the notebooks read and write a store with it."""

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from helpers import cluster
from tests.object_store.s3_server import S3Server

ROOT = pathlib.Path(__file__).parents[2]
SECRET, HUB_TOKEN = "canary/of+the/store", "hf_canaryOfTheHub"
# Trains on the notebook's latents as the other notebook does, then writes down what Ray's GCS answers anybody.
SCRIPT = """
import sys, ray
from helpers import cluster
from helpers.production import monitor
from tests.pipelines import fit, short_run

cluster.connect("local", num_cpus=4)
extras = {"evaluate": None, "trackers": {"names": ["tensorboard"]}}
config = short_run("s3://bucket/notebook", "run", max_steps=10, extras=extras)
with monitor.monitor_run(config):
    fit(config)
gcs = ray._private.worker.global_worker.gcs_client
state = ray._private.state.state
answers = [gcs.get_all_job_info(), state.job_table(), state.actor_table(None), state.node_table()]
answers += [gcs.internal_kv_get(key, None) for key in gcs.internal_kv_keys(b"", None)]
answers.append(ray.get(ray.remote(lambda: ray.get_runtime_context().runtime_env).remote()))
open(sys.argv[1], "w").write(repr(answers))
"""


def test_only_settings_that_are_no_secrets_go_to_workers(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))]:
        monkeypatch.delenv(name)
    secrets = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "HF_TOKEN"]
    for name in [*secrets, "AZURE_STORAGE_SAS_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL", "HF_HOME"]:
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:password@hub")
    travelling = cluster.worker_environment(A="1")["env_vars"]
    assert set(travelling) == {"A", "AWS_REGION", "AWS_ENDPOINT_URL", "HF_HOME", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"}
    assert not [name for name in cluster.FORWARDED if any(word in name for word in ("KEY", "SECRET", "TOKEN"))]


@pytest.mark.slow
def test_a_secret_is_in_no_file_and_in_no_answer_while_the_store_is_used_with_it(tmp_path):
    """Searched: Ray's folder and answers, run, latents, tracker, executed notebook."""
    with tempfile.TemporaryDirectory(prefix="secrets-", dir="/tmp") as folder, S3Server(secret=SECRET) as server:
        own = {"HOME": str(tmp_path), "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT), "HF_TOKEN": HUB_TOKEN}
        with server.environment():
            variables = {**os.environ, **own}
        (tmp_path / "script.py").write_text(SCRIPT)
        parameters = "{storage: s3://bucket/notebook, limit: 96, resolutions: [32], sections: []}"
        notebook = [ROOT / "Preprocessing.ipynb", tmp_path / "executed.ipynb", "-y", parameters, "--cwd", ROOT]
        for command in (["-m", "papermill", *notebook], [tmp_path / "script.py", tmp_path / "answers"]):
            done = subprocess.run(
                [sys.executable, *command], env=variables, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-4000:]
        assert server.keys("notebook/latents") and server.keys("notebook/runs/run") and server.unsigned == 0
        stored = {key: data for (_, key), (data, _) in server.objects.items()}
        assert any("events.out.tfevents" in key for key in stored)
        files = [path for place in (folder, tmp_path) for path in pathlib.Path(place).rglob("*") if path.is_file()]
        logs = {path.name for path in files}
        assert "runtime_env_agent.log" in logs and "answers" in logs
        stored |= {str(path): path.read_bytes() for path in files}
    secrets = [SECRET, HUB_TOKEN]
    assert not [name for name, data in stored.items() for secret in secrets if secret.encode() in data]
    assert b"AWS_ENDPOINT_URL" in stored[str(tmp_path / "answers")]  # a setting does travel
