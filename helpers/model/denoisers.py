"""The denoisers that `unet_config` can name: presets, and an adapter for each supported class of diffusers.

To add a class, write its adapter and list it in `ADAPTERS`. No Ray.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, ClassVar

import diffusers
import torch
from torch.nn.parallel import DistributedDataParallel

NUM_TIMESTEPS = 1000
AUXILIARY = "auxiliary"  # a denoiser's submodule in training: the weights of auxiliary losses
KL, DC = "AutoencoderKL", "AutoencoderDC"
CLIP, T5, T5GEMMA = "CLIPTextModel", "T5EncoderModel", "T5GemmaEncoder"


class Adapter:
    """A class of denoisers: its blocks, its arguments, and the models that its pipeline accepts.

    Training needs `name`, `kind`, `blocks` and `conditions`; sampling and export need the rest. The class of `kind` is
    one of diffusers, or has `from_config(dict)` and is called as `denoise` does; activation checkpointing also calls
    its `enable_gradient_checkpointing`.

    Attributes:
        name: of the class.
        parts: names of the modules that own parameters, in the order of the forward pass. The name of a `ModuleList`
            stands for its items.
        blocks: the `parts` that are sharded and compiled one by one.
        text_width: the config's name for the width of caption embeddings.
        text_cleaning: how the pipeline cleans prompts: "none" or "ftfy".
        masks_padding: True: the denoiser takes captions without padding tokens, and a mask of their tokens. False: it
            takes captions with padding tokens, and no mask.
        vaes, text_encoders: the classes of autoencoders and text encoders that the pipeline accepts.
        shifts: whether the pipeline applies an autoencoder's `shift_factor`.
        pipeline, component: diffusers' pipeline, and its name for the denoiser.
        left_out: arguments that build the pipeline without its optional models.
        samplers: values of the parameter `sampler` that the pipeline can use.
        max_tokens: the most tokens of a caption that the pipeline takes by default; None if it takes padding tokens.
        note: a sentence for users of the exported pipeline.
    """

    name: str
    parts: tuple[str, ...]
    blocks: tuple[str, ...]
    text_width: str
    text_cleaning = "none"
    masks_padding = True
    vaes, text_encoders, shifts = (KL,), (CLIP, T5, T5GEMMA), False
    pipeline: str
    component = "transformer"
    left_out: ClassVar[dict[str, Any]] = {}
    samplers = ("ddim", "dpm++", "euler", "unipc")
    max_tokens: int | None = None
    note = ""

    @property
    def kind(self) -> type[diffusers.ModelMixin]:
        """The class in diffusers. Its first use imports it, which takes seconds: use it only where a model is built."""
        return getattr(diffusers, self.name)

    def divisor(self, config: dict) -> int:
        """The number that the sides of latents must be multiples of."""
        return config["patch_size"]

    def conditions(self, timesteps_B: torch.Tensor, mask_BL: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of the forward pass besides latents and captions."""
        raise NotImplementedError

    def call_options(self, max_tokens: int) -> dict[str, Any]:
        """Arguments of the pipeline's call that make it prepare captions and sizes as training does."""
        return {}

    def set_default_size(self, denoiser: diffusers.ModelMixin, pixels: int, side: int) -> dict[str, Any]:
        """Arguments of the pipeline's class that make it generate squares of `pixels` pixels a side by default.

        This method may also change the denoiser's config. `side`: the side of such a square's latents.
        """
        denoiser.register_to_config(sample_size=side)
        return {}


class UNet(Adapter):
    """Stable Diffusion's U-Net. It reads a caption with its padding."""

    name = "UNet2DConditionModel"
    parts = ("time_embedding", "conv_in", "down_blocks", "mid_block", "up_blocks", "conv_norm_out", "conv_out")
    blocks = ("down_blocks", "mid_block", "up_blocks")
    text_width = "cross_attention_dim"
    masks_padding = False
    text_encoders = (CLIP,)
    pipeline, component = "StableDiffusionPipeline", "unet"
    left_out: ClassVar[dict[str, Any]] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }

    def divisor(self, config):
        return 2 ** (len(config["block_out_channels"]) - 1)

    def conditions(self, timesteps_B, mask_BL):
        return {"timestep": timesteps_B}


class PRX(Adapter):
    """Photoroom's transformer, with joint attention over image and caption."""

    name = "PRXTransformer2DModel"
    parts = ("txt_in", "img_in", "time_in", "resolution_embedder", "blocks", "final_layer")
    blocks = ("blocks",)
    text_width = "context_in_dim"
    text_cleaning = "ftfy"
    vaes, shifts = (KL, DC), True
    pipeline = "PRXPipeline"
    max_tokens = 256
    samplers = ("ddim", "dpm++", "unipc")  # Euler needs scaled inputs, and the pipeline does not scale them
    note = "Give it one prompt a call: with several, and guidance, this pipeline fails in diffusers 0.42."

    def conditions(self, timesteps_B, mask_BL):
        return {"timestep": timesteps_B / NUM_TIMESTEPS, "attention_mask": mask_BL}

    def call_options(self, max_tokens):
        return {"tokenizer_max_length": max_tokens, "use_resolution_binning": False, "skip_text_cleaning": True}

    def set_default_size(self, denoiser, pixels, side):
        return {"default_sample_size": pixels}


ADAPTERS = {adapter.name: adapter for adapter in (UNet(), PRX())}

# "sd2-base" is the published configuration of Stable Diffusion 2 base. "small" has the same shape at a tenth of the
# size, for one GPU; as "tiny" it takes the captions of the encoders in helpers. The transformers are PRX's;
# "transformer-600m" takes T5Gemma's captions and 16 latent channels.
MODELS = pathlib.Path(__file__).parents[1] / "models"
PRESETS = {
    "tiny": MODELS / "tiny-sd" / "unet" / "config.json",
    "small": MODELS / "unets" / "small.json",
    "sd2-base": MODELS / "unets" / "sd2-base.json",
    "tiny-transformer": MODELS / "unets" / "tiny-transformer.json",
    "transformer-600m": MODELS / "unets" / "transformer-600m.json",
}


def load_denoiser_config(name: str) -> dict:
    """The configuration of a denoiser. `name`: one of `PRESETS`, or the path of a config.json in diffusers layout.

    Raises ValueError for an unknown name, and for a file that configures no class of `ADAPTERS`.
    """
    path = PRESETS.get(name) or pathlib.Path(name)
    if not path.is_file():
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"unet_config={name!r} is unknown: choose {known}, or the path of a config.json.")
    try:
        values = json.loads(path.read_text())
    except ValueError:
        values = {}
    kind = values.get("_class_name") if isinstance(values, dict) else None
    if kind not in ADAPTERS:
        raise ValueError(
            f"unet_config={name!r} configures {kind or 'no model'}: give the config.json of a denoiser, which are "
            f"{', '.join(ADAPTERS)}."
        )
    return {key: value for key, value in values.items() if key == "_class_name" or not key.startswith("_")}


def find_adapter(name: str) -> Adapter:
    """The adapter of the denoiser that `load_denoiser_config` finds by this name; nothing is built."""
    return ADAPTERS[load_denoiser_config(name)["_class_name"]]


def build_denoiser(described: str | dict, *, seed: int = 0) -> diffusers.ModelMixin:
    """A denoiser with random weights on the CPU, the same for the same seed.

    `described`: a name as in `load_denoiser_config`, or what that returns. On the device "meta" it takes no memory.
    """
    config = load_denoiser_config(described) if isinstance(described, str) else described
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ADAPTERS[config["_class_name"]].kind.from_config(config)


def adapter_of(model: torch.nn.Module) -> Adapter:
    """The adapter of a denoiser, which may be sharded or wrapped by DDP. Raises ValueError if the class has none."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    for adapter in ADAPTERS.values():
        if isinstance(model, adapter.kind):
            return adapter
    raise ValueError(f"A {type(model).__name__} has no adapter: choose one of {', '.join(ADAPTERS)}.")


def denoise(
    model: torch.nn.Module,
    noisy_BCHW: torch.Tensor,
    timesteps_B: torch.Tensor,
    text_BLD: torch.Tensor,
    mask_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's prediction, (B, C, H, W).

    Args:
        model: a denoiser, or its wrapper by DDP.
        noisy_BCHW: latents with noise.
        timesteps_B: 0 to 1,000.
        text_BLD: caption embeddings.
        mask_BL: True for tokens, False for padding; None: the denoiser reads every position, padding tokens included.
    """
    conditions = adapter_of(model).conditions(timesteps_B, mask_BL)
    return model(noisy_BCHW, encoder_hidden_states=text_BLD, return_dict=False, **conditions)[0]


def expand_timestep(model: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook for sampling: expand the pipeline's timestep to one per row of the batch (see `PRX.note`).

    If the pipeline passes several, all rows get the first.
    """
    if "timestep" in named:
        latents = arguments[0] if arguments else named["hidden_states"]
        named = {**named, "timestep": named["timestep"].flatten()[:1].expand(len(latents))}
    return arguments, named


def parts(model: torch.nn.Module, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """{name: module} of a denoiser's parts; a `ModuleList` is replaced by its items, "name.0", "name.1"."""
    found = {}
    for name in names:
        module = getattr(model, name)
        listed = isinstance(module, torch.nn.ModuleList)
        found |= {f"{name}.{i}": part for i, part in enumerate(module)} if listed else {name: module}
    return {name: module for name, module in found.items() if module is not None}


def own_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of a denoiser, without those of auxiliary losses."""
    return {name: weight for name, weight in model.named_parameters() if not name.startswith(f"{AUXILIARY}.")}


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that are sharded and compiled one by one."""
    return list(parts(model, adapter_of(model).blocks).values())
