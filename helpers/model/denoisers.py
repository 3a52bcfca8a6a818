"""The denoisers that `unet_config` can name, by their class in diffusers: what the code around them has to know.

To add a class, write its adapter and list it in `ADAPTERS`. No Ray.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import ModelMixin, PixArtTransformer2DModel, PRXTransformer2DModel, UNet2DConditionModel
from torch.nn.parallel import DistributedDataParallel

NUM_TIMESTEPS = 1000
KL, DC = "AutoencoderKL", "AutoencoderDC"
CLIP, T5, T5GEMMA = "CLIPTextModel", "T5EncoderModel", "T5GemmaEncoder"


class Adapter:
    """One class of diffusers: how it is called, which modules are its blocks, what goes with it.

    Attributes:
        kind: the class.
        parts: the modules that own parameters, in the order of the forward pass; a list stands for those in it.
        blocks: of `parts`, what is sharded, compiled and checkpointed one by one.
        depth: the config's name for the number of blocks; None if the class has no buffers outside of its state.
        text_width: the config's name for the width of captions.
        text_cleaning: what its pipeline does to a prompt, as `PreprocessingConfig.text_cleaning`; None: any.
        masks_padding: captions come without their padding, and with a mask.
        vaes, text_encoders, shifts: the autoencoders and text encoders with which its pipeline draws, and whether it
            applies an autoencoder's `shift_factor`.
        pipeline, component: diffusers' pipeline, and what it calls this model.
        left_out: arguments that make the pipeline without what is not trained here.
        samplers: those that the pipeline can use.
        fixed: what the config must say, so that the pipeline gives the model all that it takes.
        note: what else its user has to know.
    """

    kind: type[ModelMixin]
    parts: tuple[str, ...]
    blocks: tuple[str, ...]
    depth: str | None = None
    text_width: str
    text_cleaning: str | None = None
    masks_padding = True
    vaes, text_encoders, shifts = (KL,), (CLIP, T5, T5GEMMA), False
    pipeline: str
    component = "transformer"
    left_out: ClassVar[dict[str, Any]] = {}
    samplers = ("ddim", "dpm++", "euler", "unipc")
    note = ""
    fixed: ClassVar[dict[str, Any]] = {}

    def divisor(self, config: dict) -> int:
        """The sides of latents must be multiples of it."""
        return config["patch_size"]

    def conditions(self, timesteps_B: torch.Tensor, mask_BL: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of the model's forward pass beside latents and captions."""
        raise NotImplementedError

    def call_options(self, max_tokens: int) -> dict[str, Any]:
        """The arguments that the pipeline's call needs to prepare captions and sizes as in training."""
        return {}


class UNet(Adapter):
    """Stable Diffusion's; it reads a padded caption as a whole."""

    kind = UNet2DConditionModel
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


class PixArt(Adapter):
    """PixArt-Sigma's transformer with cross-attention (Chen et al., 2024)."""

    kind = PixArtTransformer2DModel
    parts = ("pos_embed", "adaln_single", "caption_projection", "transformer_blocks", "proj_out")
    blocks = ("transformer_blocks",)
    depth = "num_layers"  # `pos_embed` is computed when the model is made
    text_width = "caption_channels"
    text_cleaning = "lower"
    pipeline = "PixArtSigmaPipeline"
    fixed: ClassVar[dict[str, Any]] = {"use_additional_conditions": False}  # PixArt-Alpha's sizes

    def conditions(self, timesteps_B, mask_BL):
        sizes = {"resolution": None, "aspect_ratio": None}  # PixArt-Alpha's, which this pipeline leaves out
        return {"timestep": timesteps_B, "encoder_attention_mask": mask_BL, "added_cond_kwargs": sizes}

    def call_options(self, max_tokens):
        return {"max_sequence_length": max_tokens, "use_resolution_binning": False, "clean_caption": False}


class PRX(Adapter):
    """Photoroom's transformer, whose picture attends to itself and the caption at once."""

    kind = PRXTransformer2DModel
    parts = ("txt_in", "img_in", "time_in", "resolution_embedder", "blocks", "final_layer")
    blocks = ("blocks",)
    text_width = "context_in_dim"
    text_cleaning = "ftfy"
    vaes, shifts = (KL, DC), True
    pipeline = "PRXPipeline"
    samplers = ("ddim", "dpm++", "unipc")  # it does not scale a scheduler's inputs, as Euler's needs
    note = "Give it one prompt a call: with several, and guidance, this pipeline fails in diffusers 0.42."

    def conditions(self, timesteps_B, mask_BL):
        return {"timestep": timesteps_B / NUM_TIMESTEPS, "attention_mask": mask_BL}

    def call_options(self, max_tokens):
        return {"tokenizer_max_length": max_tokens, "use_resolution_binning": False, "skip_text_cleaning": True}


ADAPTERS = {adapter.kind.__name__: adapter for adapter in (UNet(), PixArt(), PRX())}


def adapter_of(model: torch.nn.Module) -> Adapter:
    """The adapter of a denoiser, also of one that is sharded, or wrapped by DDP. ValueError for another class."""
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
    """(B, C, H, W) the model's prediction.

    `timesteps_B`: 0 to 1,000. `mask_BL`: True for a caption's tokens, False for padding; None: there is none.
    """
    conditions = adapter_of(model).conditions(timesteps_B, mask_BL)
    predicted = model(noisy_BCHW, encoder_hidden_states=text_BLD, return_dict=False, **conditions)[0]
    return predicted[:, : noisy_BCHW.shape[1]]  # published PixArts predict a variance, too, which has no loss here


def expand_timestep(model: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook for drawing: a row's timestep for each row, where a pipeline gives fewer; see `PRX.note`."""
    if "timestep" in named:
        latents = arguments[0] if arguments else named["hidden_states"]
        named = {**named, "timestep": named["timestep"].flatten()[:1].expand(len(latents))}
    return arguments, named


def parts(model: torch.nn.Module, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """{name: module} of parts of a denoiser, of lists those in them."""
    found = {}
    for name in names:
        module = getattr(model, name)
        listed = isinstance(module, torch.nn.ModuleList)
        found |= {f"{name}.{i}": part for i, part in enumerate(module)} if listed else {name: module}
    return {name: module for name, module in found.items() if module is not None}


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is sharded and compiled one by one."""
    return list(parts(model, adapter_of(model).blocks).values())


def build(config: dict) -> ModelMixin:
    """A denoiser of a configuration as `unet.load_unet_config` returns it."""
    return ADAPTERS[config["_class_name"]].kind.from_config(config)


def rebuild_buffers(model: torch.nn.Module, config: dict) -> None:
    """Compute what a model that was made on the "meta" device lacks beside its state, in place."""
    depth = adapter_of(model).depth
    if depth is None:
        return
    for name, buffer in build({**config, depth: 0}).named_buffers():
        model.get_buffer(name).copy_(buffer)
