"""The folder of a model: in this package, local, or downloaded from the hub at a commit that is looked up once."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import WeakFileLock, disable_progress_bars

TINY_SD, TINY_CLIP = IN_PACKAGE = ("tiny-sd", "tiny-clip")
# Files of a model's repository that nothing here reads: other formats and variants of the weights, images.
UNUSED = ["*.bin", "*.h5", "*.msgpack", "*.ckpt", "*.onnx*", "*.fp16.*", "*.non_ema.*", "safety_checker/*", "*.png"]

NOT_FOUND = (
    "{0} is neither a folder here, nor in {1.HF_HUB_CACHE}, nor given by {1.ENDPOINT}: check its name and commit, its "
    "terms if it is gated, the network, HF_TOKEN and HF_HUB_OFFLINE."
)


class Unsupported(ValueError):
    """Raised for a model, or a parameter for it, that is not supported; says which one, and what to change."""


def check_class(name: str | None, known: Iterable[str], what: str) -> None:
    """Raises Unsupported for a class that is not in `known`. `what`: the beginning of the error message."""
    if name not in known:
        raise Unsupported(f"{what} of class {name}, and this code takes {', '.join(known)}: give another model.")


def tiny_sd_folder() -> str:
    """The folder of this package's model on the machine that calls this function, in diffusers layout."""
    return model_folder(TINY_SD)


def is_hub_id(model: str) -> bool:
    return not (model in IN_PACKAGE or "://" in model or os.path.exists(model))


def pin_model(model: str, earlier: str | None = None, parameter: str = "model") -> str:
    """A model's name with its commit: "hub/id@commit" for "hub/id" or "hub/id@revision".

    A model of this package, a folder or a URI comes back unchanged. `earlier`: the pinned model of the job that is
    being resumed. Its commit is kept unless `model` names a revision. If the hub cannot be reached, the commit in this
    machine's cache is taken. Raises ValueError, naming the `parameter`, if no commit is found.
    """
    name, _, revision = model.partition("@")
    if not is_hub_id(model):
        return model
    if earlier and not revision and earlier.startswith(f"{name}@"):
        return earlier
    with explained(NOT_FOUND.format(f"{parameter}={model!r}", constants)):
        return f"{name}@{HfApi().resolve_revision(name, revision=revision or None).resolved}"


def model_folder(model: str, *patterns: str, unused: Sequence[str] = UNUSED) -> str:
    """The folder of a model on this machine: in this package, as given, or in the hub's cache (`HF_HOME`).

    For "hub/id@commit" (`pin_model`), the files that match `patterns`, and none of `unused`, are downloaded, unless the
    cache has them. A lock makes a node's processes take turns, so each file is downloaded once. A file in the cache
    needs no request. Raises ValueError for a model that is not there and cannot be downloaded.
    """
    if model in IN_PACKAGE:
        return str(pathlib.Path(__file__).parents[1] / "models" / model)
    if not is_hub_id(model):
        return model
    (name, _, revision), cache = model.partition("@"), constants.HF_HUB_CACHE
    os.makedirs(cache, exist_ok=True)
    is_writable = os.access(cache, os.W_OK)  # a cache in a container's image may not be
    lock = WeakFileLock(f"{cache}/{name.replace('/', '--')}.lock") if is_writable else contextlib.nullcontext()
    options = {"allow_patterns": list(patterns), "ignore_patterns": list(unused)}
    with lock, disable_progress_bars(), explained(NOT_FOUND.format(repr(model), constants)):
        return snapshot_download(name, revision=revision or None, **options)


@contextlib.contextmanager
def explained(sentence: str) -> Iterator[None]:
    """Context manager for code that reads models: an error becomes a ValueError that says `sentence`, then the error.

    Unsupported is raised unchanged.
    """
    try:
        yield
    except Unsupported:
        raise
    except (OSError, ValueError, errors.RevisionResolutionError) as error:
        raise ValueError(f"{sentence} ({str(error).splitlines()[0]})") from None
