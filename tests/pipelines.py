"""The notebooks' own pipelines and trainers for the tests: the functions are taken from the notebooks' cells.

What a reader sees is what is tested: `pipeline` of Preprocessing.ipynb, `stream` of
Online_Preprocessing_and_Training.ipynb, `build_trainer` of Training.ipynb and of the online notebook.
"""

import ast
import contextlib
import functools
import json
import pathlib
import types

import numpy as np

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare, stages
from helpers.encode.job import begun_with
from helpers.latents.manifest import DataSets
from helpers.latents.read import latents_reader, split_units
from helpers.lesson import ablations, captioned_shapes, full_run
from helpers.model.denoisers import build_denoiser
from helpers.notebook import interruptible
from helpers.online import encode as online
from helpers.online import prepare as online_prepare
from helpers.production import lease, monitor
from helpers.production.data.exclusions import Exclusions, mask
from helpers.production.readers import detect
from helpers.sample import pipeline_of_run
from helpers.train import loop as train_loop
from helpers.train import metrics
from helpers.train.loop import train_loop_per_worker
from helpers.train.source import StepSource
from helpers.train.step import TrainStep, Unit
from tests.latents import plan_for, read_steps

ROOT = pathlib.Path(__file__).parents[1]
PREPROCESSING, TRAINING = "Preprocessing.ipynb", "Training.ipynb"
ONLINE = "Online_Preprocessing_and_Training.ipynb"


def bound_names(statement):
    """The names that a statement at a cell's top level defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@functools.cache
def definitions(notebook):
    """{name: (the statement that defines it, whether it is a parameter)}; the first definition counts."""
    found = {}
    cells = [cell for cell in json.loads((ROOT / notebook).read_text())["cells"] if cell["cell_type"] == "code"]
    tagged = ["parameters" in cell["metadata"].get("tags", []) for cell in cells]
    for number, cell in enumerate(cells):
        is_parameter = number <= tagged.index(True)  # the tagged cell, and the folded one above it
        for statement in ast.parse("".join(cell["source"])).body:
            for name in bound_names(statement):
                found.setdefault(name, (statement, is_parameter))
    return found


def defaults(notebook):
    """{parameter: its default} of a notebook."""
    found = definitions(notebook).items()
    return {name: ast.literal_eval(statement.value) for name, (statement, is_parameter) in found if is_parameter}


def profile_with_commits(name):
    """A profile in which what it leaves open is given."""
    return filled(full_run.read_profile(name))


def filled(values):
    """Parameters with a commit and a bucket in place of a profile's placeholders."""
    return json.loads(json.dumps(values).replace("REPLACE_WITH_COMMIT", "0" * 40).replace("://your-", "://a-"))


def free_names(statement):
    """The names that a statement takes from the notebook: what it loads, but a function's own variables."""
    if isinstance(statement, ast.FunctionDef):
        nodes = [node for part in statement.body for node in ast.walk(part)]
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {argument.arg for argument in ast.walk(statement.args) if isinstance(argument, ast.arg)}
        outside = [*statement.decorator_list, *statement.args.defaults, *statement.args.kw_defaults]
        return {node.id for node in nodes if isinstance(node, ast.Name)} - own | {
            node.id for part in outside if part for node in ast.walk(part) if isinstance(node, ast.Name)
        }
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def from_notebook(notebook, name, **values):
    """The function `name` as a notebook's cell defines it.

    It sees the notebook's imports and the defaults of its parameters; `values` are other parameters, and what the
    cells above it make (`config`, `job`, ...).
    """
    known = definitions(notebook)
    space = {"__name__": "__main__", **values}  # as in a kernel: sent to Ray's workers by value

    def define(wanted):
        statement = known[wanted][0]
        for needed in free_names(statement) & known.keys() - bound_names(statement) - space.keys():
            define(needed)
        exec(compile(ast.Module([statement], []), f"{notebook}:{wanted}", "exec"), space)
        space.update(values)  # an import brings the neighbours of a name too

    define(name)
    return space[name]


def parameters(notebook, config, **changes):
    """The values of `config` that are parameters of the notebook, and the others that are given."""
    known = defaults(notebook)
    return {**{name: value for name, value in config.to_dict().items() if name in known}, **changes}


def stand_in(module, **changes):
    """The module, or one in which some names stand for something else."""
    if all(vars(module)[name] is value for name, value in changes.items()):
        return module
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return types.SimpleNamespace(**{**public, **changes})


def untrained_pipeline(config=None, seed=0, sampler="auto"):
    """diffusers' pipeline of a run before its first step, with the autoencoder and text encoder in helpers."""
    config = config or TrainingConfig()
    manifest, _ = ablations.random_batch(config, num_tokens=24)
    manifest.encoder["model"] = "tiny-sd"
    return pipeline_of_run(build_denoiser(config.unet_config, seed=seed), manifest, config, sampler=sampler)


def build_pipeline(job, transform=stages.transform, latent_encoder=encoder.LatentEncoder):
    """`pipeline(segment)` of Preprocessing.ipynb."""
    return from_notebook(
        PREPROCESSING,
        "pipeline",
        job=job,
        extras=job.config.extras,
        stages=stand_in(stages, transform=transform),
        encoder=stand_in(encoder, LatentEncoder=latent_encoder),
    )


def detected(config):
    """The config with the format and the columns of its input, as the notebooks find them."""
    return detect.detect(config, begun_with(config.latents_uri)).config


def prepare_job(config, **options):
    """A job as Preprocessing.ipynb prepares it."""
    listed = Exclusions(**(config.extras.get("exclusions") or {}))
    return prepare.prepare_job(detected(config), recorded=listed.record(config.latents_uri), **options)


def prepare_run(raw, config):
    """`(manifest, raw)` of an online run, as its notebook prepares it."""
    found = detect.detect(raw, begun_with(config.latents_uri))
    return online_prepare.prepare_run(found.config, config)


def encode(config, progress=None, **changes):
    """Run a whole preprocessing job, or with other parts (see `build_pipeline`); returns its manifest."""
    job = prepare_job(config)
    return job.run(build_pipeline(job, **changes), progress)


def draw_and_encode(storage_uri, num_rows):
    """Drawn pictures, encoded at 32 pixels: data for `short_run`. Returns the storage."""
    config = PreprocessingConfig(storage=str(storage_uri), resolutions=[32], validation_share=0.05)
    captioned_shapes.write_data_set(config.raw_uri, num_rows)
    encode(config)
    return config.storage


TWO_WORKERS = {"num_training_workers": 2, "strategy": "fsdp", "resolution": {32: 0.5, 64: 0.5}}


def evaluated(every, **changes):
    """`extras` of a run that is evaluated every so many steps, with two prompts; `changes`: arguments of `Evaluate`."""
    return {"evaluate": {"every": every, "prompts": ["a red circle", "a blue square"], "sampling_steps": 2, **changes}}


def short_run(storage_uri, name, **changes):
    """The parameters of a run of some seconds, two units a step, that saves every ten steps and is not evaluated."""
    return TrainingConfig(
        **{
            "storage": storage_uri,
            "run_name": name,
            "resolution": 32,
            "global_batch_size": 32,
            "units_per_step": 2,
            "max_steps": 40,
            "warmup_steps": 4,
            "checkpoint_every": 10,
            "extras": {"evaluate": None},
            "validation_share": 0.05,
            **changes,
        }
    )


def read_alone(plan, num_steps, raw, seed, is_excluded):
    """Yield the rows of a run's first steps without Ray; those of an online run, from `raw`, are encoded as its are."""
    read = functools.partial(online.read_raw, config=raw) if raw else mask(latents_reader(plan), is_excluded)
    tables = read_steps(plan, read, 0, num_steps)
    if raw is None:
        yield from tables
        return
    latent_encoder = encoder.LatentEncoder(**prepare.encoder_arguments(raw, num_captions=1))
    for table in tables:
        for start in range(0, len(table), plan.block_rows):  # as the blocks travel
            block = table.slice(start, plan.block_rows).combine_chunks()
            yield latent_encoder(
                online.transform_for_epoch(block, config=raw, units_per_epoch=plan.units_per_epoch, seed=seed)
            )


def train_alone(alone, manifest, plan, tables, steps):
    """[(loss, samples_crc32)] of steps by a `TrainStep` in this process; `tables` begin with the first one's rows."""
    config, units, found = alone.config, {}, []
    for table in tables:
        units.update(split_units(table, config.unit_rows))
    for place, step in enumerate(steps):
        batch = [
            Unit.from_arrow(
                units[place * config.units_per_step + slot], manifest, plan.latents_at(place), slot * config.unit_rows
            )
            for slot in range(config.units_per_step)
        ]
        loss = alone.step(step, batch)["loss"]
        found.append((loss, metrics.samples_crc32([i for unit in batch for i in unit.ids])))
    return found


def bare(config, prepare=None, raw=None):
    """The run that Ray should reproduce, without Ray: [(loss, samples_crc32)] of its steps, in this process.

    `prepare(step)`: changes the `TrainStep` before its first step, for example loads weights. `raw`: an online run's.
    """
    plan, manifest = plan_for(config), DataSets.open(config.proportions).first
    alone = TrainStep(config, manifest)
    if prepare:
        prepare(alone)
    excluded = Exclusions(**(config.extras.get("exclusions") or {}))
    tables = read_alone(plan, config.max_steps, raw, config.seed, excluded.is_excluded)
    return train_alone(alone, manifest, plan, tables, range(config.max_steps))


def assert_bare(config, expected=None, rtol=1e-5, **options):
    """Every batch and loss of a run is that of `bare`; losses within `rtol`."""
    losses, samples = zip(*(expected or bare(config, **options)), strict=True)
    found = metrics.read_metrics(config.run_uri)
    assert found["step"].tolist() == list(range(1, config.max_steps + 1))
    assert found["samples_crc32"].tolist() == list(samples)
    np.testing.assert_allclose(found["loss"], losses, rtol=rtol)


def online_stream(
    config, seed=0, latent_encoder=encoder.LatentEncoder, transform=online.transform_for_epoch, **changes
):
    """`stream` of the online notebook over `config`'s raw rows; `changes`: values of the notebook's parameters."""
    return from_notebook(
        ONLINE,
        "stream",
        **parameters(ONLINE, config, **{"seed": seed, **changes}),
        raw=config,
        encode=stand_in(online, transform_for_epoch=transform),
        encoder=stand_in(encoder, LatentEncoder=latent_encoder),
    )


def trainer_of(notebook, config, loop, **changes):
    """`build_trainer` of a notebook, for workers that run `loop`."""
    changes = {"test_prompts": ["a red circle", "a blue square"], "detector": None, **changes}
    changes["loop"] = stand_in(train_loop, train_loop_per_worker=loop)
    return from_notebook(notebook, "build_trainer", **parameters(notebook, config, **changes))


def fit(config, loop=train_loop_per_worker, stream=None, source=None, **changes):
    """Run the trainer of Training.ipynb; with a `stream` or another `source` that of the online notebook.

    Returns Ray Train's result. `changes`: values of the notebook's parameters, or names that its cells import or make,
    such as `detector`.
    """
    monitor.open_run(config)
    source = StepSource(config, stream) if stream else source
    build = trainer_of(ONLINE if source else TRAINING, config, loop, **changes)
    with contextlib.ExitStack() as stack:
        for extra in build.__globals__["chosen"].values():
            stack.enter_context(extra.on_driver(config))
        stack.enter_context(lease.hold(config.run_uri, f"run_name={config.run_name!r}"))
        stack.enter_context(interruptible())
        return build(source or config).fit()
