"""What the notebooks show of the pipeline, raw rows, a finished job, held-out prompts, and errors."""

from __future__ import annotations

import contextlib
import html
import os
import re
import symtable
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import ray.train
from diffusers.utils import logging as diffusers_logging
from IPython import InteractiveShell, get_ipython
from IPython.display import HTML, display
from PIL import Image
from transformers.utils import logging as transformers_logging

from .. import sample, storage
from ..config import PreprocessingConfig, TrainingConfig
from ..encode import stages
from ..encode.captions import load_tokenizer
from ..latents import held_out, schema
from ..latents.manifest import DataSets, Manifest, read_manifest
from ..latents.parquet import read_parquet
from ..notebook import printable
from ..online.config import OnlineConfig
from ..production.extras import scores
from ..production.readers import detect
from ..raw import filters, images, inputs, readers
from ..train import run_folder
from ..train.start import read_config
from . import captioned_shapes
from .sections import check_names, choose_sections


def setup(sections: Sequence[str] = (), known: Sequence[str] = ()) -> None:
    """Prepare a notebook: errors as one sentence, the chosen `sections` (see `choose_sections`), quiet libraries.

    Raises ValueError if a parameters cell sets a name that is no parameter (`check_names`).
    """
    fold_tracebacks()
    choose_sections(sections, known)
    if (shell := get_ipython()) is not None:
        check_names(shell.user_ns["In"])
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # else it says that torchvision is missing


def fold_tracebacks() -> None:
    """Show an error in this notebook as one sentence, which papermill prints too, and its traceback folded.

    Tables show dollar signs, where pandas and the notebook would make formulas.
    """
    pd.set_option("display.html.use_mathjax", False)
    if (shell := get_ipython()) is not None:
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_error)


def _show_error(shell, kind, error, trace, tb_offset=None):
    """An error of a Ray task, of a subclass of NameError, gets no note; a cell that was stopped no traceback."""
    if isinstance(error, KeyboardInterrupt):
        print(printable(error) or "Stopped: this cell did not finish.")
        return
    error.args = tuple(printable(one) if isinstance(one, str) else one for one in error.args)
    if kind is NameError:
        error.add_note(cell_to_run(error.name, notebook_cells(shell)))
    text = html.escape("".join(traceback.format_exception(kind, error, trace)))
    display(HTML(f"<details><summary>Traceback</summary><pre>{text}</pre></details>"))
    shell.showtraceback((kind, error, trace), exception_only=True)


def notebook_cells(shell: InteractiveShell) -> list[dict[str, Any]]:
    """The cells of this notebook as they were saved last; [] if the kernel does not know its file.

    JupyterLab and VS Code name the file.
    """
    path = shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    return storage.read_json(path)["cells"] if os.path.isfile(path) else []


def cell_to_run(name: str, cells: Sequence[dict[str, Any]]) -> str:
    """A sentence that says which of a notebook's `cells` defines a missing name."""
    heading = "its beginning"
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)$", source, re.MULTILINE) or [heading])[-1]
        elif cell["cell_type"] == "code" and defines(source, name):
            first = next(line for line in source.splitlines() if line and not line.startswith("#"))
            return f"Run first the cell that begins with `{first}`, under {heading!r}."
    return "Run the cells above this one first: Run > Run All Above Selected Cell."


def defines(source: str, name: str) -> bool:
    """Whether the code binds the name at its top level."""
    try:
        table = symtable.symtable(source, "cell", "exec")
    except SyntaxError:  # a cell that a reader has begun
        return False
    return name in table.get_identifiers() and (table.lookup(name).is_assigned() or table.lookup(name).is_imported())


def catch_up() -> None:
    """Run the notebook's cells above the one that calls it, but for the sections. Nothing, if they have been run.

    For a kernel that was restarted after a run: a finished run is not trained again.
    """
    shell = get_ipython()
    if "config" in shell.user_ns:
        return
    if not (cells := notebook_cells(shell)):
        raise RuntimeError("This kernel does not know its notebook's file: run the cells above, with sections = [].")
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if "show.catch_up()" in source:
            return
        if not source.startswith("# section: "):
            shell.run_cell(source).raise_error()


def stage_rates(manifest: Manifest, config: PreprocessingConfig) -> pd.DataFrame:
    """Images/s of each stage, all its workers together, and their number."""
    workers = {"transform": config.num_transform_workers, "encode": config.most_encoders, "write": 1}
    rows = manifest.read - manifest.filtered
    seconds = {stage: manifest.work[f"{stage}_seconds"] for stage in workers}
    rates = [(stage, number * rows / seconds[stage], number) for stage, number in workers.items() if seconds[stage]]
    return pd.DataFrame(rates, columns=["stage", "images_per_second", "workers"])


def dataset_stats(
    config: PreprocessingConfig, num_rows: int = 2000, seed: int = 0
) -> tuple[pd.DataFrame, list[Image.Image], list[str]]:
    """`(frame, pictures, captions)` of a random sample of rows.

    The frame has one row per sample: `tokens` (of the whole caption, with begin and end), `width` and `height` (from
    the headers; NaN without an image). `pictures` and `captions` are those of twelve rows, decoded.
    """
    rows = inputs.to_raw_rows(random_rows(config, num_rows, seed), config)
    captions = [caption or "" for caption in rows[inputs.CAPTION].to_pylist()]
    sizes = [picture_size(data) or (None, None) for data in rows[inputs.IMAGE].to_pylist()]
    tokenizer = load_tokenizer(config.model_of("text_encoder"))
    tokens = [len(ids) for ids in tokenizer(captions, truncation=False, verbose=False)["input_ids"]]
    frame = pd.DataFrame(sizes, columns=["width", "height"], dtype=float)
    frame.insert(0, "tokens", tokens)
    shown = good_rows(rows, config, 12)
    return frame, [picture for _, picture, _ in shown], [caption for _, _, caption in shown]


def preview(config: PreprocessingConfig, num_rows: int) -> list[tuple[int | str, Image.Image, str]]:
    """`[(row id, picture, caption)]` of the first good raw rows, decoded here, before any pipeline is built.

    Raises ValueError if there are none.
    """
    rows = inputs.to_raw_rows(detect.first_rows(config, 4 * num_rows), config)
    shown = good_rows(rows, config, num_rows)
    if not shown:
        raise ValueError(
            f"None of the first {len(rows)} rows of {config.data_uri} can be used at "
            f"resolutions={list(config.resolutions)}: choose a smaller resolution, or give other data."
        )
    return shown


def picture_size(data: bytes | None) -> tuple[int, int] | None:
    """(width, height) from the header of encoded bytes, upright; None if they are not an image."""
    try:
        return images.upright_size(images.open_image(data))
    except images.BadImage:
        return None


def good_rows(rows: pa.Table, config: PreprocessingConfig, num_rows: int) -> list[tuple[int | str, Image.Image, str]]:
    """`[(row id, picture, caption)]` of the first raw rows that the transform accepts."""
    good = []
    for start in range(0, len(rows), num_rows):
        some = rows.slice(start, num_rows)
        done = stages.decode_rows(some, config)
        good += [row for row, made in zip(some.to_pylist(), done, strict=True) if not made.reason]
        if len(good) >= num_rows:
            break
    # A picture that would kill its process is not among them.
    return [(row[inputs.ID], images.decode(row[inputs.IMAGE]), row[inputs.CAPTION]) for row in good[:num_rows]]


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame to be shown, whose texts may be a user's."""
    return frame.map(lambda value: printable(value) if isinstance(value, str) else value)


def input_tables(found: detect.Found) -> list[pd.DataFrame]:
    """The input's files by kind: found = read + left out; and the columns that are taken, with why."""
    files = pd.DataFrame(found.files, columns=["files", "found", "read", "why they are left out"])
    files.insert(3, "left out", files["found"] - files["read"])
    files.loc[files["left out"] == 0, "why they are left out"] = ""
    return [as_text(files), as_text(pd.DataFrame(found.columns, columns=["parameter", "taken", "why"]))]


def summary(manifest: Manifest) -> pd.DataFrame:
    """What became of a job's rows: read = written (online: usable) + rejected (by reason) + filtered."""
    rows = [("rows read", "", manifest.read), ("usable" if manifest.online else "written", "", manifest.written)]
    rows += [("of these", note, count) for note, count in manifest.noted.items()]
    rows += [("rejected", reason, count) for reason, count in manifest.rejected.items()]
    rows += [("filtered", "", manifest.filtered)]
    return pd.DataFrame(rows, columns=["what", "reason", "number"])


def finished_run(storage_uri: str, run_name: str) -> tuple[TrainingConfig, ray.train.Checkpoint]:
    """`(config, newest intact checkpoint)` of a run; prints what damaged ones it left out. FileNotFoundError if there
    is none.

    In a notebook: ValueError if a parameters cell sets a name that is no parameter.
    """
    if (shell := get_ipython()) is not None:
        check_names(shell.user_ns["In"])
    uri = TrainingConfig(storage=storage_uri, run_name=run_name).run_uri
    saved, problems = run_folder.last_sound(uri)
    for name, why in problems.items():
        print(f"{name} is left out: {why}.")
    if saved is None:
        raise FileNotFoundError(
            f"run_name={run_name!r} has no checkpoint in {uri}: run Training.ipynb first, with this storage and "
            "run_name, or change them."
        )
    config = TrainingConfig(**{**read_config(uri)["parameters"], "storage": storage_uri})
    return config, run_folder.as_checkpoint(saved)


def read_rejects(latents_uri: str, max_files: int | None = None) -> pd.DataFrame:
    """Rejected rows as a frame with columns id, reason, source: all, or those of the first `max_files` files."""
    files = storage.list_files(storage.join(latents_uri, "rejects"), ".parquet")[:max_files]
    tables = list(map(read_parquet, files))
    columns = [schema.ID, schema.REASON, schema.SOURCE]
    return as_text(pa.concat_tables(tables).to_pandas() if tables else pd.DataFrame(columns=columns))


def read_run_rejects(run_uri: str) -> pd.DataFrame:
    """The bad rows that a run found, each once: a frame with columns id, reason, source."""
    return read_rejects(run_uri).drop_duplicates().reset_index(drop=True)


def random_rows(config: PreprocessingConfig, num_rows: int, seed: int = 0) -> pa.Table:
    """`num_rows` rows as stored in up to 16 random files, with `path`, without those that `row_filter` drops.

    If the filter drops all of them, a sentence is printed, and they are returned unfiltered.
    """
    random = np.random.default_rng(seed)
    paths, _ = inputs.list_inputs(config)
    chosen = [paths[number] for number in random.permutation(len(paths))[:16]]
    num_each, tables = -(-num_rows // len(chosen)), []
    for path in chosen:
        with contextlib.suppress(*[readers.Unreadable] * (len(chosen) > 1)):  # the job leaves such a file out
            tables += [inputs.with_path(table, path) for table in sample_file(path, config, num_each, random)]
    rows = detect.join_alike(tables)
    rows = rows.take(random.permutation(len(rows))[:num_rows])
    kept = rows.filter(pa.array(filters.kept_rows(rows, config.row_filter)))
    if len(kept) == 0 and len(rows):
        print(f"row_filter={config.row_filter!r} leaves none of {len(rows):,} random rows: they are shown without it.")
        return rows
    return kept


def sample_file(
    path: str, config: PreprocessingConfig, num_rows: int, random: np.random.Generator
) -> Iterator[pa.Table]:
    """Tables with the first rows of random row groups of a file, `num_rows` in all.

    A tar's first rows are taken: seeking in it would mean reading all of it.
    """
    read, left = inputs.reader(config), num_rows
    if config.input_format == "webdataset":
        selections = [None]  # from the beginning
    else:
        selections = [[int(group)] for group in random.permutation(len(read.row_groups(path)))]
    share = max(1, num_rows // min(4, max(1, len(selections))))  # of a row group, which may be the whole file
    for selection in selections:
        wanted = min(left, share)
        for table in read.stream(path, inputs.used_columns(config), selection):
            yield table[:wanted]
            left -= len(table[:wanted])
            wanted -= len(table[:wanted])
            if wanted == 0:
                break
        if left == 0:
            return


def prompts_and_detector(config: TrainingConfig, num_prompts: int) -> tuple[list[str], Callable | None]:
    """`(prompts, detector)`: captions that training does not see, and a function that scores images of them.

    The drawn sample data has captions that no drawn image has, and `captioned_shapes.agreement`. Other data has the
    captions of held-out rows (of training rows, if nothing is held out), and None. Prompts that the parameter `extras`
    gives for `evaluate` replace them.
    """
    given = scores.read_prompts((config.extras.get("evaluate") or {}).get("prompts"))
    rows = held_out.first(config.proportions, config.largest_resolution, num_prompts) if given is None else None
    captions = given or (first_captions(config, num_prompts) if rows is None else rows[schema.CAPTION].to_pylist())
    try:
        for caption in captions:
            captioned_shapes.parse(caption)
    except ValueError:
        return captions, None
    return given or captioned_shapes.held_out_prompts(num_prompts), captioned_shapes.agreement


def held_out_pictures(training: TrainingConfig) -> tuple[list[np.ndarray], list[str]]:
    """`(pictures, captions)`: what the latents of held-out rows decode to; of the first rows, if none are held out."""
    manifest = DataSets.open(training.proportions).first
    rows = held_out.of_run(training.run_uri, training.proportions, training.largest_resolution)
    if rows is None:
        rows = held_out.example_rows(next(iter(training.proportions)), held_out.NUM_ROWS)
    pictures, captions = [], []
    for spec in manifest.latents_at(training.largest_resolution):
        moments, is_there = spec.decode(rows[spec.name])
        pictures += list(sample.reconstruct(manifest.vae_model, moments[np.asarray(is_there)]))
        captions += rows.filter(pa.array(np.asarray(is_there)))[schema.CAPTION].to_pylist()
    return pictures, captions


def first_captions(training: TrainingConfig, num_rows: int) -> list[str]:
    """Captions of the first rows that a run is trained on, encoded before or during it."""
    uri = next(iter(training.proportions))
    raw = read_manifest(uri).online
    if raw is None:
        return held_out.example_rows(uri, num_rows)[schema.CAPTION].to_pylist()
    config = OnlineConfig(**raw)
    rows = detect.first_rows(config, num_rows)
    return [captions[0] for captions in inputs.captions_of(rows, config) if not inputs.caption_reason(captions[0])]
