"""The preprocessing job on a real Ray: what is written, what is rejected, and what happens when it is run again."""

import collections
import re
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import encoder
from helpers.encode.captions import caption_ids
from helpers.lesson import captioned_shapes
from helpers.raw import images
from tests import by_hand, pipelines
from tests.pipelines import build_pipeline, prepare_job

ROWS = 600


@pytest.fixture
def finished(encoded):
    """The finished job over the sample data: its config and manifest."""
    return encoded


def test_every_input_row_is_written_or_rejected_with_a_reason(finished):
    config, manifest = finished
    folders = config.raw_uri, f"{config.latents_uri}/data", f"{config.latents_uri}/rejects"
    raw, written, rejected = map(pq.read_table, folders)
    assert sorted(written["id"].to_pylist() + rejected["id"].to_pylist()) == sorted(map(str, raw["hash"].to_pylist()))
    assert manifest.read == ROWS == manifest.written + sum(manifest.rejected.values())
    assert manifest.written == written.num_rows
    assert manifest.rejected == collections.Counter(rejected["reason"].to_pylist())
    assert set(rejected["source"].to_pylist()) <= {f"shapes-0000{number}.parquet" for number in range(3)}


def test_stored_latents_are_what_the_encoder_gives(finished):
    config, manifest = finished
    table = pq.read_table(f"{config.latents_uri}/data")
    by_id = {str(row["hash"]): (row["jpg"], row["caption"]) for row in pq.read_table(config.raw_uri).to_pylist()}
    latent_encoder = encoder.LatentEncoder(config.encoder_model)
    for row in range(0, table.num_rows, 97):
        data, caption = by_id[table["id"][row].as_py()]
        assert table["caption"][row].as_py() == caption
        picture = images.decode(data)
        for resolution in (32, 64):
            spec = manifest.latents(resolution)
            pixels = images.cut(picture, images.center_crop(picture.size), (resolution, resolution))
            expected = latent_encoder.encode_images(pixels[None])[0]
            stored, valid = spec.decode(table[spec.name].slice(row, 1))
            assert valid.all()
            np.testing.assert_allclose(stored.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.02)
        text, _ = manifest.embeddings.decode(table["caption_embeddings"].slice(row, 1))
        expected = latent_encoder.encode_captions(caption_ids([caption], config))[0]
        np.testing.assert_allclose(text.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.02)


def test_an_interrupted_cell_leaves_no_actors_and_no_files(cluster, tmp_path):
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_data_set(config.raw_uri, 2500, rows_per_file=500)
    job, free = prepare_job(config), int(ray.available_resources()["CPU"])

    def interrupt(done, total):
        signal.raise_signal(signal.SIGINT)  # the first time that files have been written

    with pytest.raises(KeyboardInterrupt):
        job.run(build_pipeline(job), interrupt)
    assert storage.list_files(storage.join(config.latents_uri, "data")) == []
    # All CPUs that were free can only be had at once when no actor and no task is left.
    assert ray.get(ray.remote(num_cpus=free)(lambda: True).remote(), timeout=300)


def test_files_of_somebody_else_are_not_deleted(tmp_path):
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_data_set(config.raw_uri, 20)
    (tmp_path / "latents/data").mkdir(parents=True)
    (tmp_path / "latents/data/train-00000.parquet").write_bytes(b"somebody's")
    with pytest.raises(ValueError, match=r"holds files that do not belong to an unfinished job \(.*train-00000"):
        prepare_job(config)
    assert (tmp_path / "latents/data/train-00000.parquet").exists()


def test_an_input_that_changed_is_refused(tmp_path):
    """A job cleans up behind an interrupted one, and leaves the files that it did not write."""
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_data_set(config.raw_uri, 20)
    job = prepare_job(config)

    def interrupted(segment):
        (tmp_path / "latents/data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "latents/data/notes.txt").write_text("put there while the job ran")
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        job.run(interrupted)
    assert (tmp_path / "latents/data/notes.txt").exists()
    captioned_shapes.write_data_set(config.raw_uri, 30)
    with pytest.raises(ValueError, match="was begun with input_crc32="):
        prepare_job(config)


@pytest.mark.parametrize(
    ("notebook", "rows"), [(pipelines.PREPROCESSING, "latent_rows"), (pipelines.ONLINE, "latents")]
)
def test_transform_and_encoder_by_hand_are_stages_of_their_own(notebook, rows, cluster, tmp_path, capsys):
    """As the notebook's diagram shows. With `num_cpus=1`, as a task has, Ray Data would fuse them into the actor."""
    captioned_shapes.write_data_set(tmp_path, 10)
    given = dict(raw_folder=str(tmp_path), models=lambda: by_hand.MODELS)
    by_hand.run_until(notebook, rows, **given)[rows].explain()
    plan = capsys.readouterr().out.rpartition("Physical Plan (Optimized)")[2]
    encoding, (kind, fused), *_ = re.findall(r"(\w+)MapOperator\[(.*)\]", plan)
    assert encoding == ("ActorPool", "MapBatches(Encoder)")
    assert kind == "TaskPool" and fused.endswith("MapBatches(transform)")
