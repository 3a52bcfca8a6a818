"""Which errors of Ray are worth another attempt (`was_lost`), and one sentence for an error. No PyTorch.

Files that a store refuses are tried again by `storage.retry`.
"""

import contextlib
import re
from collections.abc import Iterator

import ray.exceptions

# What Ray raises when a node, an actor or a worker is lost, or an object or task because of that.
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.ActorUnschedulableError,
)


def was_lost(error: BaseException) -> bool:
    """Whether an error says that a node, an actor or a worker was lost: the same work may succeed elsewhere.

    An actor that fails in its own `__init__` is not lost, because it would fail again: an encoder, for example, that
    cannot load its model. If a Ray Data task raised the error, often only its text arrives.
    """
    wrapped = isinstance(error, (ray.exceptions.RayTaskError, ray.exceptions.UnserializableException))
    text = str(error) if wrapped else ""
    named = [getattr(ray.exceptions, name, object) for name in re.findall(r"ray\.exceptions\.(\w+)", text)]
    in_init = getattr(error, "actor_init_failed", False) or "in its creation task" in text
    return (isinstance(error, LOST) or any(issubclass(kind, LOST) for kind in named)) and not in_init


def summarize_error(text: str) -> str:
    """One sentence for an error: what a traceback ends with, else the line that says what happened to the worker.

    Ray Data's own error, in which it wraps another one, is left out.
    """
    if "\n  File " in text and (named := re.findall(r"^(?!ray\.)[\w.]*?(\w+: .+)$", text, re.MULTILINE)):
        return named[-1][:500]
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    telling = [
        line for line in lines if any(word in line for word in (" dead", " died", "unavailable", "has been hanging"))
    ]
    line = lines[-1] if "Traceback" in text else (telling or lines)[0]
    return line.split(". ")[0][:500]


@contextlib.contextmanager
def in_a_sentence(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raises RuntimeError, "{what}: {why}", in place of Ray's errors and those of other `kinds`.

    Without it, a notebook shows the traceback of each process that an error passed through.
    """
    try:
        yield
    except (ray.exceptions.RayError, *kinds) as error:
        # Ray Train's errors have those of its workers, or its controller's.
        causes = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None) or error]
        raise RuntimeError(f"{what}: {summarize_error(str(causes[0]))}") from None
