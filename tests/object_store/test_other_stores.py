"""Azure's object store, by its emulator on this machine where it is installed: `npm install -g azurite`.

Google's is not tested: the emulator on PyPI does not finish the uploads of Google's C++ client, which pyarrow uses.
"""

import shutil
import subprocess

import psutil
import pytest

from helpers import storage
from tests.faults import wait_until

# The account and the key that every Azurite has: https://github.com/Azure/Azurite#default-storage-account
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def listening_port(process):
    """The port on which a process listens; None as long as there is none."""
    ports = [found.laddr.port for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    return ports[0] if ports else None


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The URI of a container in an emulator, whose variables are in the environment."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed: npm install -g azurite")
    options = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    server = psutil.Popen(
        [program, *options],
        cwd=tmp_path_factory.mktemp("azurite"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: listening_port(server) or server.poll() is not None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
            patch.setenv("AZURE_STORAGE_KEY", KEY)
            patch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", f"http://127.0.0.1:{listening_port(server)}/{ACCOUNT}")
            storage.open_filesystem("abfs://bucket")[0].create_dir("bucket")
            yield "abfs://bucket"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("name", ["plain", "a b#c%20ü:?"])
def test_any_key_can_be_written_listed_read_and_deleted(store, tmp_path, name):
    folder = storage.join(store, "files", name)
    for file in ("deep/a.json", "deep/b.json"):
        storage.write_json(storage.join(folder, file), {"text": "grüße"})
    found = storage.list_files(folder, ".json", recursive=True)
    assert found == [storage.join(folder, "deep", file) for file in ("a.json", "b.json")]
    assert storage.read_json(found[0]) == {"text": "grüße"}
    storage.copy_folder(folder, tmp_path / "copy")
    storage.copy_folder(tmp_path / "copy", storage.join(store, "copies", name))
    assert storage.sizes(storage.join(store, "copies", name)) == storage.sizes(folder)
    assert storage.join(store, "copies", name) in storage.list_folders(storage.join(store, "copies"))
    storage.delete(found[0])
    assert storage.list_files(folder, recursive=True) == found[1:]
    storage.delete(folder)
    assert not storage.exists(folder)


def test_azures_account_must_be_given(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(ValueError, match="names no storage account"):
        storage.exists("abfs://pictures/a")


@pytest.mark.parametrize("uri", ["s3://", "gs:///folder", "gss://bucket/folder"])
def test_a_uri_of_no_known_store_is_one_sentence(uri):
    with pytest.raises(ValueError, match="cannot be opened"):
        storage.exists(uri)
