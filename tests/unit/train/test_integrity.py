"""A damaged or foreign checkpoint is neither believed nor run."""

import io
import json
import pathlib
import pickle
import shutil
import tempfile
import types

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import storage
from helpers.model import diffusion
from helpers.train import checkpoint, run_folder, start
from helpers.train.checkpoint import METADATA, DamagedCheckpoint, MetadataUnpickler


def parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()
    return types.SimpleNamespace(model=model, optimizer=optimizer, ema=diffusion.EMA(model, 0.9))


def save(run, step, of_run=None):
    folder = run / run_folder.checkpoint_name(step, 1)
    folder.mkdir(parents=True)
    checkpoint.async_save(str(folder), parts(step), step=step, stager=checkpoint.open_stager(), run=of_run)()
    return folder


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of steps 1 and 2."""
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def data_file(folder):
    return next(folder.glob("*.distcp"))


@pytest.mark.parametrize("which", ["a piece", "the metadata"])
def test_a_checkpoint_damaged_at_its_full_size_is_left_for_the_one_before(run, which):
    newest = run / run_folder.checkpoint_name(2, 1)
    file = data_file(newest) if which == "a piece" else newest / METADATA
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run_folder.find_corruption(str(newest)) is None  # all files are there
    with pytest.raises(DamagedCheckpoint, match="is damaged after byte"):
        checkpoint.load(str(newest), parts())
    uri, problems = run_folder.last_sound(str(run))
    assert storage.name(uri) == run_folder.checkpoint_name(1, 1) and problems.keys() == {newest.name}
    sentence, end = run_folder.describe_problems(problems, uri)
    assert sentence.startswith(f"{newest.name} cannot be used: its file {file.name} is damaged after byte ")
    assert end == f"The run resumes from {storage.name(uri)}."
    assert run_folder.last_complete(str(run)) == uri  # noted: nobody takes the other one again
    assert run_folder.last_sound(str(run)) == (uri, {})


def test_a_power_loss_that_zeroes_the_newest_checkpoint_and_cuts_the_list_leaves_the_one_before(run):
    """The bytes are read before anything is deleted, whatever Ray Train's list says."""
    zeroed = data_file(run / run_folder.checkpoint_name(2, 1))
    zeroed.write_bytes(bytes(zeroed.stat().st_size))
    (run / start.SNAPSHOT).write_text('{"checkpoint_results": [')
    said = start.reconcile_checkpoints(str(run))
    (left,) = run_folder.list_checkpoints(str(run))
    assert storage.name(left) == run_folder.checkpoint_name(1, 1) and said[-1] == f"The run resumes from {left[-24:]}."
    assert run_folder.choose_resume_point(str(run)) == {"checkpoint": left, "step": 1}


ANY_JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
)
HARM = st.one_of(
    st.none(),
    st.just(lambda data, at: bytes(len(data))),
    st.just(lambda data, at: data[: int(at * len(data))]),
    st.just(lambda data, at: data[: (place := int(at * len(data)))] + bytes([data[place] ^ 1]) + data[place + 1 :]),
    ANY_JSON.map(lambda value: lambda data, at: json.dumps(value).encode()),
)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run's folder with checkpoints of steps 1 to 3, and Ray Train's list of them."""
    run = tmp_path_factory.mktemp("whole") / "run"
    names = [save(run, step, of_run="this").name for step in (1, 2, 3)]
    listed = {"checkpoint_results": [{"checkpoint_dir_name": name} for name in names]}
    (run / start.SNAPSHOT).write_text(json.dumps(listed))
    storage.write_json(run / run_folder.ID, {"id": "this"})
    return run


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    harms=st.lists(st.tuples(st.integers(0, 20), HARM, st.floats(0, 1, exclude_max=True)), max_size=4),
    is_driver=st.booleans(),
)
def test_whatever_is_damaged_the_newest_whole_checkpoint_is_kept_and_chosen(three, harms, is_driver):
    """One or several files of a run are deleted, zeroed, cut, changed by a bit, or hold other JSON.

    Afterwards Ray Train's list, which it fails to read otherwise, names folders that are there.
    """
    before = {path.name: contents(path) for path in three.glob("checkpoint-*")}
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(shutil.copytree(three, f"{folder}/run"))
        files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != run_folder.ID)
        for number, harm, at in harms:
            path = files[number % len(files)]
            if harm is None:
                path.unlink(missing_ok=True)
            elif path.exists() and (data := path.read_bytes()):
                path.write_bytes(harm(data, at))
        whole = [name for name in sorted(before) if contents(run / name) == before[name]]
        said = start.reconcile_checkpoints(str(run)) if is_driver else []
        point = run_folder.choose_resume_point(str(run))
        assert all("\n" not in sentence for sentence in said)
        if is_driver and (listed := run / start.SNAPSHOT).exists():
            names = [result["checkpoint_dir_name"] for result in json.loads(listed.read_text())["checkpoint_results"]]
            assert all(run_folder.find_corruption(str(run / name)) is None for name in names)
        assert point["step"] >= (run_folder.step_of_name(whole[-1]) if whole else 0)
        if point["checkpoint"]:
            chosen = pathlib.Path(point["checkpoint"])
            assert point["step"] == checkpoint.load(str(chosen), parts()) == run_folder.step_of_name(chosen.name)
            found, expected = contents(chosen), before[chosen.name]
            assert all(found[name] == expected[name] for name in expected if name != run_folder.PROGRESS)


def test_a_checkpoint_that_cannot_be_read_now_is_left_for_the_one_before_and_not_deleted(run, monkeypatch):
    newest, read, refused = run_folder.checkpoint_name(2, 1), run_folder.sum_part, ["checkpoint-000000002"]

    def sum_part(uri, part):
        if any(name in uri for name in refused):
            raise OSError(5, "Input/output error")
        return read(uri, part)

    monkeypatch.setattr(run_folder, "sum_part", sum_part)
    said = start.reconcile_checkpoints(str(run))
    assert said[0].startswith(f"{newest} cannot be used: it cannot be read: ") and (run / newest).exists()
    assert run_folder.choose_resume_point(str(run))["step"] == 1
    refused.append("checkpoint-000000001")
    with pytest.raises(OSError, match="Input/output"):  # nothing starts over while a storage does not answer
        run_folder.choose_resume_point(str(run))
    refused.clear()
    assert run_folder.choose_resume_point(str(run))["step"] == 2


def test_a_checkpoint_of_another_run_is_refused_by_name_and_kept(run, tmp_path):
    other, foreign = tmp_path / "other", run_folder.checkpoint_name(3, 1)
    run_folder.run_id(str(run))
    save(other, 3, of_run=run_folder.run_id(str(other)))
    (other / foreign).rename(run / foreign)
    with pytest.raises(ValueError, match=f"{foreign} is of another run: move it"):
        start.reconcile_checkpoints(str(run))
    assert (run / foreign).exists()


def test_a_runs_id_stays_and_is_found_again_in_its_checkpoints(run):
    found = run_folder.run_id(str(run))
    save(run, 3, of_run=found)
    (run / run_folder.ID).unlink()
    assert run_folder.run_id(str(run)) == found


def test_a_run_without_a_sound_checkpoint_starts_over(run):
    for folder in run.iterdir():
        data_file(folder).write_bytes(bytes(data_file(folder).stat().st_size))
    uri, problems = run_folder.last_sound(str(run))
    assert uri is None and len(problems) == 2
    assert run_folder.describe_problems(problems, uri)[-1] == "The run starts over."


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
    with pytest.raises(DamagedCheckpoint, match="model.extra is no tensor"):
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
