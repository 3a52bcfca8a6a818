"""What is refused before a run, besides what the core refuses (`train.start.CHECKS`): sentences by check.

A check is a function `(config, data) -> sentences`. The first one that finds something refuses the run.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import diffusers
import safetensors
import torch
from pyarrow import fs

from ... import storage
from ...config import TrainingConfig, first_difference
from ...distributed import COMPILED_SHAPES
from ...latents.manifest import DataSets, read_segments
from ...latents.parquet import MEND
from ...latents.plan import Plan, plan_run
from ...model import denoisers, diffusion
from ...train import checkpoint, run_folder, start
from ..extras.repa import repa_fits

LISTED_ROWS = 10**8  # a larger data set's files are not listed before a run: they are checked when they are read


# ---- the data


def mixture_fits(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if data sets of different encoders or layouts are mixed."""
    names = ("num_captions", "encoder", "text_cleaning", "columns", "scaling_factor", "shift_factor", "id_type")
    names = (*names, "empty_caption_embedding")
    settings = {uri: {name: getattr(manifest, name) for name in names} for uri, manifest in data.manifests.items()}
    (first_uri, first), *others = settings.items()
    for uri, theirs in others:
        if found := first_difference(theirs, first):
            name, *values = found
            what = "" if name == "empty_caption_embedding" else " ({} and {})".format(*values)
            yield (
                f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: encode both with the same "
                "settings."
            )


def captions_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if `caption_shares` has another number than the data has captions."""
    for uri, manifest in data.manifests.items():
        if config.caption_shares and len(config.caption_shares) != manifest.num_captions:
            yield (
                f"caption_shares={list(config.caption_shares)} has {len(config.caption_shares)} numbers, and {uri} "
                f"holds {manifest.num_captions} captions a row: give one for each, or None."
            )


def files_are_there(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for the first file that is missing or has another size than was written.

    It lists the folder once, which takes an object store a second for each thousand files.
    """
    for uri, manifest in data.manifests.items():
        if manifest.online or manifest.written > LISTED_ROWS:
            continue
        sizes = storage.sizes(storage.join(uri, "data"))
        for file in (file for segment in read_segments(uri) for file in segment["files"]):
            name, size = file["name"], file.get("bytes")
            if name not in sizes or size not in (None, sizes[name]):
                found = f"has {sizes[name]:,} bytes in place of {size:,}" if name in sizes else "is missing"
                yield f"{storage.join(uri, 'data', name)} {found}: {MEND}."
                return


# ---- the denoiser


def denoiser_is_supported(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """Sentences that say why the denoiser cannot be trained or sampled.

    Runs a training step on the "meta" device, which computes shapes alone.
    """
    denoiser = denoisers.load_denoiser_config(config.unet_config)
    adapter, channels = denoisers.ADAPTERS[denoiser["_class_name"]], denoiser["in_channels"]
    side, which = 2 * adapter.divisor(denoiser), f"unet_config={config.unet_config!r} cannot be trained or sampled"
    try:
        with torch.device("meta"):
            model = denoisers.build_denoiser(config.unet_config).to("meta")
            text_BLD, mask_BL = torch.ones(2, 8, denoiser[adapter.text_width]), torch.ones(2, 8, dtype=torch.bool)
            latents_BCHW, mask_BL = torch.ones(2, channels, side, side), mask_BL if adapter.masks_padding else None
            denoisers.denoise(model, latents_BCHW, torch.ones(2), text_BLD, mask_BL).sum().backward()
    except Exception as error:  # of any kind, from diffusers
        reason = str(error).splitlines()[0].rstrip(".")
        yield f"{which} on latents, timesteps and captions alone: {reason}."
        return
    predicted = model.config.get("out_channels") or channels
    if predicted != channels:
        yield f"{which}: out_channels={predicted} is not in_channels={channels}, which {adapter.pipeline} needs."
    if unused := [name for name, parameter in model.named_parameters() if parameter.grad is None]:
        yield f"{which}: {len(unused)} parameters get no gradient, such as {unused[0]}: leave out what they belong to."
    if any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules()):
        yield f"{which}: its dropout is not 0, and a resumed run would draw other numbers: set it to 0."


def encoders_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if the denoiser's pipeline does not take the data's encoders."""
    adapter = denoisers.find_adapter(config.unet_config)
    for uri, manifest in data.manifests.items():
        padded, unfit = not manifest.embeddings.ragged, []
        vae, text_encoder = f"vae_model={manifest.vae_model!r}", f"text_encoder_model={manifest.text_encoder_model!r}"
        if manifest.vae_class not in adapter.vaes:
            unfit.append(f"{vae}, {manifest.vae_class}, not {' or '.join(adapter.vaes)}")
        if manifest.shift_factor and not adapter.shifts:
            unfit.append(f"{vae}, whose shift_factor={manifest.shift_factor} it does not apply")
        if manifest.text_encoder_class not in adapter.text_encoders:
            names = " or ".join(adapter.text_encoders)
            unfit.append(f"{text_encoder}, {manifest.text_encoder_class}, not {names}")
        if padded and adapter.masks_padding:
            unfit.append("maximum_tokens=None: it masks padding, and these captions are padded")
        if not padded and not adapter.masks_padding:
            unfit.append("maximum_tokens: it takes padded captions")
        if adapter.text_cleaning not in (None, manifest.text_cleaning):
            unfit.append(f"captions cleaned by {manifest.text_cleaning!r}: it cleans them by {adapter.text_cleaning!r}")
        if unfit:
            yield (
                f"unet_config={config.unet_config!r} samples by {adapter.pipeline}, and {uri} was encoded with "
                f"{'; with '.join(unfit)}: encode the data again, with this unet_config in Preprocessing.ipynb, or "
                "choose another unet_config."
            )


def first_weights_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if a new run cannot start from what `init_from` names.

    A run that already has a checkpoint of its own is not checked.
    """
    if not config.init_from or run_folder.last_complete(config.run_uri):
        return
    try:
        folder = checkpoint.find_weights(config.init_from, config.unet_config, storage.join(config.storage, "runs"))
    except ValueError as error:
        yield str(error)
        return
    given, manifest = f"init_from={config.init_from!r}", data.first
    if run_folder.is_checkpoint(folder):
        run_uri = folder.rpartition("/")[0].removesuffix(f"/{run_folder.BEST}")
        if not storage.exists(storage.join(run_uri, "config.json")):
            yield f"{given} is a checkpoint in {run_uri}, which lacks the config.json of its run: copy that file there."
            return
        if why := run_folder.find_damage(folder):
            yield f"{given} is {folder}, which cannot be used: {why}: choose another step by run@step."
            return
        begun = start.read_config(run_uri)
        parameters, vae = begun["parameters"], begun["data"][0]
        theirs = begun.get("denoiser") or denoisers.load_denoiser_config(parameters["unet_config"])
        objective, is_other = parameters["prediction_type"], parameters["zero_terminal_snr"] != config.zero_terminal_snr
        encoder = vae.get("encoder", {})
        if all(encoder.get(name) != manifest.encoder.get(name) for name in ("model", "revision")):
            yield (
                f"{given} was trained on latents of {encoder.get('model')!r}, and this data is of "
                f"{manifest.vae_model!r}: encode the data with that model, or, if both hold the same VAE, start from "
                "the pipeline that the run exported."
            )
    else:
        theirs, pipeline = storage.read_json(storage.join(folder, "config.json")), folder.rpartition("/")[0]
        objective, is_other = objective_of_pipeline(pipeline, config)
        path = storage.join(pipeline, "vae", "config.json")
        vae = storage.read_json(path, "get the pipeline again") if storage.exists(path) else {}
        yield from unfit_weights(config.unet_config, folder, given)
    yield from other_settings(config.unet_config, theirs, given)
    if objective not in (None, config.prediction_type):
        yield (
            f"{given} was trained with prediction_type={objective!r}, not {config.prediction_type!r}: start from "
            "weights of the same."
        )
    elif is_other:
        yield (
            f"{given} was trained with another noise schedule than this run's, with "
            f"zero_terminal_snr={config.zero_terminal_snr}: start from weights of the same."
        )
    for name, ours in (("scaling_factor", manifest.scaling_factor), ("shift_factor", manifest.shift_factor)):
        if (value := vae.get(name) or 0) != ours and name in vae:
            yield (
                f"{given} was trained on latents of a VAE with {name}={value}, and this data's has {ours}: start from "
                "weights for the same VAE, or encode the data with that one."
            )


def unfit_weights(unet_config: str, folder: str, given: str) -> Iterator[str]:
    """A sentence for weights in diffusers layout that are not the denoiser's, whole, and finite.

    A tensor that is missing would keep its random values.
    """
    files = checkpoint.weight_files(folder)
    if not files:
        yield (
            f"{given}: {folder} holds no weights in safetensors, {checkpoint.WEIGHTS} or its parts, and other files "
            "are not opened, as a .bin may run code: save the denoiser again with safe_serialization=True and without "
            "a variant."
        )
        return
    with torch.device("meta"):
        expected = {name: list(one.shape) for name, one in denoisers.build_denoiser(unet_config).state_dict().items()}
    found = {}
    for uri in files:
        try:
            found |= read_tensors(uri)
        except (OSError, safetensors.SafetensorError):
            yield f"{given}: {uri} is missing, cut short or no safetensors file: get the weights again."
            return
    for name in sorted(expected | found):
        shape, problem = found.get(name, (None, None))
        if name not in found:
            problem = f"lack {name}"
        elif name not in expected:
            problem = f"hold {name}, which unet_config={unet_config!r} does not have"
        elif shape != expected[name]:
            problem = f"hold {name} with shape {shape}, and unet_config={unet_config!r} has {expected[name]}"
        if problem:
            yield f"{given}: the weights in {folder} {problem}: get them again."
            return


def read_tensors(uri: str) -> dict[str, tuple[list[int], str | None]]:
    """{name: (shape, problem or None)} of a safetensors file's tensors. Raises SafetensorError if it is not whole.

    Reads the values, a tensor at a time, because one that is not finite would end the run at its first step.
    """
    filesystem, path = storage.open_filesystem(uri)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if not storage.is_local(uri):
            source, path = path, f"{folder}/weights"
            fs.copy_files(source, path, filesystem, fs.LocalFileSystem())
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor, problem = file.get_tensor(name), None
                if not tensor.is_floating_point():
                    problem = f"hold {name} as {tensor.dtype}, not as floating-point numbers"
                elif not tensor.float().isfinite().all():
                    problem = f"hold numbers in {name} that are not finite"
                found[name] = list(tensor.shape), problem
    return found


def objective_of_pipeline(uri: str, config: TrainingConfig) -> tuple[str | None, bool]:
    """`(prediction_type, whether its noise schedule is not the run's)` by a pipeline's scheduler; None without one."""
    path = storage.join(uri, "scheduler", "scheduler_config.json")
    if not storage.exists(path):
        return None, False
    scheduler = storage.read_json(path, "get the pipeline again", shape={"_class_name": str})
    found = scheduler.get("prediction_type", "epsilon")
    if "FlowMatch" in scheduler["_class_name"] or found == "flow_prediction":
        return "flow", False
    kind = getattr(diffusers, scheduler["_class_name"], None)
    theirs = getattr(kind and kind.from_config(scheduler), "alphas_cumprod", None)
    if theirs is None or config.prediction_type == "flow":
        return found, False
    ours = diffusion.noise_schedule(config.prediction_type, config.zero_terminal_snr).alphas_cumprod
    return found, theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=0, atol=1e-4)


def other_settings(unet_config: str, theirs: dict[str, Any], given: str) -> Iterator[str]:
    """A sentence for the first value of a denoiser's config that `unet_config` sets otherwise.

    A value that changes no weight's shape counts too. The default image size does not count. `theirs`: the denoiser's
    config. `given`: the beginning of the sentence.
    """
    ours = denoisers.load_denoiser_config(unet_config)
    arguments = list(inspect.signature(denoisers.ADAPTERS[ours["_class_name"]].kind.__init__).parameters.items())[1:]
    defaults = {"_class_name": None} | {name: argument.default for name, argument in arguments}
    for name, default in defaults.items():
        value, own = theirs.get(name, default), ours.get(name, default)
        if name != "sample_size" and not same_setting(value, own):
            yield (
                f"{given} is a denoiser with {name}={value}, and unet_config={unet_config!r} has {own}: start from one "
                "of the same configuration, or give its config.json as unet_config."
            )
            return


def same_setting(one: Any, other: Any) -> bool:
    """Whether two values of a config are equal; a single value stands for a list with that value for each block."""
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    if isinstance(one, list) == isinstance(other, list):
        return one == other
    several, single = (one, other) if isinstance(one, list) else (other, one)
    return all(value == single for value in several)


def parts_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each part of a run that does not belong to the others: all that a manifest can tell, at once."""
    for check in (denoiser_is_supported, encoders_fit, start.columns_fit, start.widths_fit, captions_fit):
        yield from check(config, data)


ALL: Sequence[start.Check] = (
    mixture_fits,
    parts_fit,
    start.plan_is_filled,
    first_weights_fit,
    files_are_there,
    repa_fits,
)


# ---- what is said, and not refused


def notes(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each thing that the run will not use."""
    for uri, manifest in data.manifests.items():
        share = manifest.job["validation_share"]
        if config.validation_share not in (0, share):
            yield f"validation_share={config.validation_share} is not used: {uri} was encoded with {share}."
    if config.warmup_steps >= config.max_steps:
        yield (
            f"warmup_steps={config.warmup_steps} is not less than max_steps={config.max_steps}: the learning rate only "
            "rises. Fewer warm-up steps in a new run let it fall."
        )
    shapes = describe_shapes(plan_run(data, config))
    for shape in shapes:
        if not shape["steps"]:
            yield (
                f"Images of {shape['shape']} are left out: their {shape['rows']} rows do not fill a batch of "
                f"{config.global_batch_size}."
            )
    if config.compile_unet and len(shapes) > COMPILED_SHAPES:
        yield (
            f"compile_unet=True compiles for {COMPILED_SHAPES} shapes, and the data has {len(shapes)}: later shapes "
            "run as without it. Encode with fewer aspect_ratios."
        )


def describe_shapes(plan: Plan) -> list[dict]:
    """One dict for each shape: {"shape": images' size, "rows", "steps" per epoch, "left_over": rows not used}."""
    return [
        {
            "shape": "x".join(map(str, shape.latents.size)),
            "rows": shape.num_rows,
            "steps": int(steps),
            "left_over": shape.num_rows - int(steps) * plan.batch_rows,
        }
        for shape, steps in zip(plan.shapes, plan.shape_steps, strict=True)
    ]
