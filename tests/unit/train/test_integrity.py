"""A damaged or foreign checkpoint is neither believed nor run."""

import io
import json
import pathlib
import pickle
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import storage
from helpers.model import diffusion
from helpers.train import checkpoint, run_folder
from helpers.train.checkpoint import METADATA, DamagedCheckpoint, MetadataUnpickler


def parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()
    return types.SimpleNamespace(model=model, optimizer=optimizer, ema=diffusion.EMA(model, 0.9))


def save(run, step):
    folder = run / run_folder.checkpoint_name(step, 1)
    folder.mkdir(parents=True)
    checkpoint.async_save(str(folder), parts(step), step=step, stager=checkpoint.open_stager())()
    return folder


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of steps 1 and 2."""
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def data_file(folder):
    return next(folder.glob("*.distcp"))


def zeros(data):
    data[:] = bytes(len(data))


def one_bit(data):
    data[len(data) // 2] ^= 1


def lost_block(data):
    start, stop = len(data) // 3, len(data) // 2
    data[start:stop] = bytes(stop - start)


@pytest.mark.parametrize("damage", [zeros, one_bit, lost_block])
@pytest.mark.parametrize("which", ["a piece", "the metadata"])
def test_a_checkpoint_damaged_at_its_full_size_is_left_for_the_one_before(run, damage, which):
    newest = run / run_folder.checkpoint_name(2, 1)
    file = data_file(newest) if which == "a piece" else newest / METADATA
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    assert run_folder.find_corruption(str(newest)) is None  # all files are there
    with pytest.raises(DamagedCheckpoint, match="is damaged after byte"):
        checkpoint.load(str(newest), parts())
    uri, (sentence,) = run_folder.last_sound(str(run))
    assert storage.name(uri) == run_folder.checkpoint_name(1, 1)
    assert sentence.startswith(f"{newest.name} cannot be used: its file {file.name} is damaged after byte ")
    assert sentence.endswith(f"The run resumes from {storage.name(uri)}.")
    assert run_folder.last_complete(str(run)) == uri  # noted: nobody takes the other one again
    assert run_folder.last_sound(str(run)) == (uri, [])


def test_a_run_without_a_sound_checkpoint_starts_over(run):
    for folder in run.iterdir():
        data_file(folder).write_bytes(bytes(data_file(folder).stat().st_size))
    uri, sentences = run_folder.last_sound(str(run))
    assert uri is None and len(sentences) == 2 and sentences[-1].endswith("The run starts over.")


def sum_again(folder):
    """As in a checkpoint that somebody else has made: its sizes and checksums agree."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != run_folder.PROGRESS}
    sums = {name: run_folder.sum_parts(str(folder / name), size) for name, size in sizes.items()}
    storage.write_json(folder / run_folder.PROGRESS, {"step": 2, "files": sizes, "checksums": sums})


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def test_code_in_a_foreign_checkpoints_metadata_is_not_run(run, tmp_path):
    newest, canary = run / run_folder.checkpoint_name(2, 1), tmp_path / "canary"
    metadata = pickle.loads((newest / METADATA).read_bytes())
    metadata.planner_data = Canary(canary)
    (newest / METADATA).write_bytes(pickle.dumps(metadata))
    sum_again(newest)
    with pytest.raises(DamagedCheckpoint, match="names (builtins.getattr|pathlib.*touch), which no checkpoint holds"):
        checkpoint.load_weights(str(newest), torch.nn.Linear(256, 256), "model")
    assert not canary.exists()
    pickle.loads((newest / METADATA).read_bytes())
    assert canary.exists()


def test_code_in_a_foreign_checkpoints_entries_is_not_run(tmp_path):
    canary, model = tmp_path / "canary", torch.nn.Linear(4, 4)
    state = {"model": {**model.state_dict(), "extra": Canary(canary)}}
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    canary.unlink(missing_ok=True)
    sum_again(tmp_path / "foreign")
    wanted = {"model": {**model.state_dict(), "extra": None}}
    with pytest.raises(DamagedCheckpoint, match="model.extra holds more than numbers and texts"):
        checkpoint.read(str(tmp_path / "foreign"), wanted, no_dist=True)
    assert not canary.exists()


def test_metadata_that_names_a_file_elsewhere_is_refused(run, tmp_path):
    newest = run / run_folder.checkpoint_name(2, 1)
    metadata = pickle.loads((newest / METADATA).read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../{run_folder.checkpoint_name(1, 1)}/{stored.relative_path}"
    (newest / METADATA).write_bytes(pickle.dumps(metadata))
    sum_again(newest)
    with pytest.raises(DamagedCheckpoint, match="names a file outside of it"):
        checkpoint.load_weights(str(newest), torch.nn.Linear(256, 256), "model")


def test_every_file_of_a_checkpoint_has_checksums_of_its_parts(run, monkeypatch):
    newest = run / run_folder.checkpoint_name(2, 1)
    progress = json.loads((newest / run_folder.PROGRESS).read_text())
    assert (
        progress["checksums"].keys()
        == progress["files"].keys()
        == {path.name for path in newest.iterdir()} - {run_folder.PROGRESS}
    )
    monkeypatch.setattr(run_folder, "PART_BYTES", 10_000)
    sum_again(newest)
    assert run_folder.find_damage(str(newest)) is None
    file = data_file(newest)
    data = bytearray(file.read_bytes())
    data[25_000] ^= 1
    file.write_bytes(data)
    assert run_folder.find_damage(str(newest)) == f"its file {file.name} is damaged after byte 20,000"


def test_the_unpickler_makes_what_dcp_writes(run):
    data = (run / run_folder.checkpoint_name(2, 1) / METADATA).read_bytes()
    assert MetadataUnpickler(io.BytesIO(data)).load() == pickle.loads(data)
