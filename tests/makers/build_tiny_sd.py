"""Trains and writes tiny-sd, a complete text-to-image model that is small enough to be part of the repository.

    python -m tests.makers.build_tiny_sd [--output helpers/models/tiny-sd] [--seed 0]

It trains a VAE and a CLIP text encoder on captioned shapes, writes them with a tokenizer, a noise
schedule and a U-Net's config in diffusers layout (fp16), and prints the scores that the model card,
tiny-sd/README.md, lists. The U-Net has no weights: the notebooks train it.

Sources: VAE, Rombach et al. 2022, https://arxiv.org/abs/2112.10752 (without the adversarial loss);
text encoder, Radford et al. 2021 (CLIP), https://arxiv.org/abs/2103.00020; hard negatives as in
Yuksekgonul et al. 2023, https://arxiv.org/abs/2210.01936.
"""

import argparse
import contextlib
import copy
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPVisionConfig, CLIPVisionModel

from helpers.lesson import captioned_shapes

FOLDER = Path(__file__).parents[2] / "helpers/models/tiny-sd"
MAX_TOKENS = 24  # the longest caption has 16, with start and end
TEXT_WIDTH = 128
VAE_CONFIG = dict(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(8, 16, 32, 64),
    layers_per_block=1,
    latent_channels=4,
    norm_num_groups=2,
    mid_block_add_attention=False,
    sample_size=64,
)
UNET_CONFIG = dict(
    sample_size=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    mid_block_type="UNetMidBlock2D",  # with attention: slower steps and worse pictures
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(32, 64),
    layers_per_block=1,
    norm_num_groups=16,
    attention_head_dim=(2, 4),  # SD2's use of the name: the number of heads
    cross_attention_dim=TEXT_WIDTH,
    use_linear_projection=True,
)
SCHEDULER_CONFIG = dict(
    num_train_timesteps=1000,
    beta_schedule="scaled_linear",
    beta_start=0.00085,
    beta_end=0.012,
    prediction_type="v_prediction",
    clip_sample=False,
    set_alpha_to_one=False,
    steps_offset=1,
)
SPLIT_SEEDS = {"train": 1000, "unseen": 2000}  # + seed: seeds of the pictures; a user's seed 0 draws none of them


def draw_shapes(num: int, seed: int, two_object_share: float, split: str) -> tuple[torch.Tensor, list[str]]:
    """`num` pictures of captioned shapes, uint8 (N, 3, 64, 64), and their captions."""
    rows = [captioned_shapes.draw_sample(i, seed, two_object_share, split) for i in range(num)]
    pixels_NHWC = np.stack([np.asarray(picture) for picture, _ in rows])
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).contiguous(), [caption for _, caption in rows]


def draw_textures(num: int, seed: int) -> torch.Tensor:
    """`num` textures, uint8 (N, 3, 64, 64): colour noise at several scales, half of them with hard edges.

    With them, the VAE also learns to reconstruct pictures other than shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(num, 3, 1, 1, generator=generator).expand(-1, -1, 64, 64).clone()
    # As in photographs, high frequencies are weaker, and the channels are correlated.
    for cells, strength in ((2, 0.5), (4, 0.35), (8, 0.25), (16, 0.15), (32, 0.08)):
        gray = torch.randn(num, 1, cells, cells, generator=generator)
        color = torch.randn(num, 3, cells, cells, generator=generator)
        amount = strength * torch.rand(num, 1, 1, 1, generator=generator)
        pixels += F.interpolate(amount * (gray + 0.5 * color), size=64, mode="bicubic", align_corners=False)
    regions = F.interpolate(torch.randn(num, 1, 4, 4, generator=generator), size=64, mode="bicubic") > 0
    other = pixels.roll(1, 0)
    edged = torch.rand(num, 1, 1, 1, generator=generator) < 0.5
    pixels = torch.where(edged & regions, other, pixels)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _normalise(pixels_BCHW: torch.Tensor) -> torch.Tensor:
    return pixels_BCHW.float() / 127.5 - 1


def _crops_around_objects(pixels_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A 32x32 crop of each 64x64 picture that holds a random pixel of an object."""
    is_object_BN = (pixels_BCHW != pixels_BCHW[:, :, :1, :1]).any(1).flatten(1)
    place = torch.multinomial(is_object_BN.float(), 1, generator=generator).squeeze(1)
    y, x = place // 64, place % 64
    shift = torch.randint(-10, 11, (2, len(x)), generator=generator)
    top, left = (y - 16 + shift[0]).clamp(0, 32), (x - 16 + shift[1]).clamp(0, 32)
    return torch.stack(
        [p[:, y : y + 32, x : x + 32] for p, y, x in zip(pixels_BCHW, top.tolist(), left.tolist(), strict=True)]
    )


def train_vae(num_steps: int, seed: int) -> AutoencoderKL:
    """An AutoencoderKL (654 k parameters, 8x down, 4 channels) with `scaling_factor` = 1/std of its latents.

    The first 60 % of the steps use 32x32 crops around objects, where the detail is, the rest whole pictures at
    64x64 and, every fourth step, at 32x32. One picture in eight is a texture.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes, _ = draw_shapes(16000, SPLIT_SEEDS["train"] + seed, 0.5, "train")
    textures = draw_textures(4000, seed)
    vae = AutoencoderKL(**VAE_CONFIG).to(memory_format=torch.channels_last)  # 1.3x as fast on a CPU
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, num_steps))
    ema = copy.deepcopy(vae)

    def pick(pool, num):
        return pool[torch.randint(len(pool), (num,), generator=generator)]

    started = time.process_time()
    for step in range(num_steps):
        whole = step >= 0.6 * num_steps
        batch_size = 32 if whole and step % 4 else 64
        num_textures = batch_size // 8
        shapes_batch, textures_batch = pick(shapes, batch_size - num_textures), pick(textures, num_textures)
        if not whole:
            shapes_batch = _crops_around_objects(shapes_batch, generator)
            corner = torch.randint(33, (2,), generator=generator).tolist()
            textures_batch = textures_batch[:, :, corner[0] : corner[0] + 32, corner[1] : corner[1] + 32]
        pixels = _normalise(torch.cat([shapes_batch, textures_batch]))
        if whole and step % 4 == 0:
            pixels = F.avg_pool2d(pixels, 2)  # antialiased halving
        pixels = pixels.contiguous(memory_format=torch.channels_last)

        posterior = vae.encode(pixels).latent_dist
        reconstruction = vae.decode(posterior.sample(generator)).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = F.l1_loss(reconstruction, pixels) + F.mse_loss(reconstruction, pixels) + 3e-4 * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.995, (step + 1) / (step + 10))
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(list(ema.parameters()), list(vae.parameters()), step)
        if step % 500 == 0 or step == num_steps - 1:
            print(
                f"VAE step {step}: loss {loss.item():.4f}, {time.process_time() - started:.0f} CPU-seconds", flush=True
            )

    ema.to(memory_format=torch.contiguous_format).eval()
    with torch.no_grad():
        latents = torch.cat(
            [ema.encode(_normalise(part)).latent_dist.sample(generator) for part in shapes[:4000].split(250)]
        )
    ema.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
    return ema


def warmup_cosine(step: int, num_steps: int, num_warmup: int = 60) -> float:
    return min((step + 1) / num_warmup, 0.5 * (1 + np.cos(np.pi * step / num_steps)))


@torch.no_grad()
def reconstruction_scores(vae: AutoencoderKL, num: int = 500, seed: int = 0) -> dict[str, float]:
    """How well `vae` reconstructs unseen pictures of held-out captions, from the posterior mean, rounded to 8 bits.

    PSNR in dB, from the mean squared error over all pictures of values in 0..1, and the share of reconstructions in
    which the detector finds every attribute right; for scenes of one and of two objects at 64x64, and of one at 32x32.
    """
    scores = {}
    for name, two_object_share, side in (("one", 0.0, 64), ("two", 1.0, 64), ("one", 0.0, 32)):
        pixels, captions = draw_shapes(num, SPLIT_SEEDS["unseen"] + seed, two_object_share, "held_out")
        if side == 32:
            pixels = F.avg_pool2d(pixels.float(), 2)
        back = torch.cat([reconstruct(vae, part) for part in pixels.split(50)])
        mse = F.mse_loss(back.float() / 255, pixels.float() / 255).item()
        scores[f"psnr_{name}_{side}"] = float(-10 * np.log10(mse))
        scores[f"detector_{name}_{side}"] = captioned_shapes.agreement(
            list(back.permute(0, 2, 3, 1).numpy()), captions
        )["all"]
    return scores


def reconstruct(vae: AutoencoderKL, pixels_BCHW: torch.Tensor) -> torch.Tensor:
    """Encode and decode by the posterior's mean: values in 0..255 -> uint8, same shape."""
    decoded = vae.decode(vae.encode(_normalise(pixels_BCHW)).latent_dist.mode()).sample
    return ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def build_tokenizer() -> CLIPTokenizer:
    """A CLIPTokenizer with one token for each word of the captions; other text is split into bytes.

    Byte-pair encoding, Sennrich et al. 2016: the most frequent pair is merged until every word is one token.
    """
    captions = [caption for num_objects in (1, 2) for caption in captioned_shapes.captions(num_objects)]
    words = sorted({word for caption in captions for word in caption.split()})
    spellings = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while any(len(s) > 1 for s in spellings):
        pairs = [pair for s in spellings for pair in itertools.pairwise(s)]
        best = max(sorted(set(pairs)), key=pairs.count)
        merges.append(best)
        spellings = [_merge(s, best) for s in spellings]
    characters = sorted(ByteLevel.alphabet())
    merged = ["".join(pair) for pair in merges]
    tokens = [*characters, *(c + "</w>" for c in characters), *merged, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def _merge(spelling: list[str], pair: tuple[str, str]) -> list[str]:
    merged = []
    for token in spelling:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Writes `tokenizer` both as tokenizer.json and as the vocab.json and merges.txt of older releases."""
    tokenizer.save_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    end = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    special = {"bos_token": "<|startoftext|>", **end}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Token ids (B, MAX_TOKENS), padded and cut to that length."""
    return tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


ATTRIBUTES = {
    "background": list(captioned_shapes.COLORS),
    "color": list(captioned_shapes.COLORS),
    "shape": list(captioned_shapes.SHAPES),
    "size": list(captioned_shapes.SIZES),
    "position": list(captioned_shapes.POSITIONS),
    "color_2": list(captioned_shapes.COLORS),
    "shape_2": list(captioned_shapes.SHAPES),
    "size_2": list(captioned_shapes.SIZES),
    "relation": list(captioned_shapes.RELATIONS),
}


def attribute_labels(captions: list[str]) -> dict[str, torch.Tensor]:
    """For each of ATTRIBUTES, the index of its value in each caption, as written; -100 if the caption has none."""
    labels = {name: [] for name in ATTRIBUTES}
    for caption in captions:
        scene = captioned_shapes.parse(caption)
        values = {"background": scene.background, "relation": scene.relation, "position": scene.objects[0].position}
        for suffix, thing in zip(("", "_2"), scene.objects, strict=False):
            values |= {"color" + suffix: thing.color, "shape" + suffix: thing.shape, "size" + suffix: thing.size}
        for name, choices in ATTRIBUTES.items():
            value = values.get(name)
            labels[name].append(-100 if value is None else choices.index(value))
    return {name: torch.tensor(values) for name, values in labels.items()}


def change_one_attribute(scene: captioned_shapes.Scene, rng: np.random.Generator) -> captioned_shapes.Scene:
    """A scene that differs from `scene` in exactly one attribute: the hard negative of its caption."""

    def other(choices, *taken):
        return str(rng.choice([c for c in choices if c not in taken]))

    colors = [scene.background, *(thing.color for thing in scene.objects)]
    which = int(rng.integers(len(scene.objects)))
    thing = scene.objects[which]
    kind = str(rng.choice(["background", "color", "shape", "size", "place"]))
    if kind == "background":
        return replace(scene, background=other(captioned_shapes.COLORS, *colors))
    if kind == "place" and scene.relation:
        return replace(scene, relation=other(captioned_shapes.RELATIONS, scene.relation))
    if kind == "place":
        thing = replace(thing, position=other(captioned_shapes.POSITIONS, thing.position))
    elif kind == "color":
        thing = replace(thing, color=other(captioned_shapes.COLORS, *colors))
    else:
        choices = captioned_shapes.SHAPES if kind == "shape" else captioned_shapes.SIZES
        thing = replace(thing, **{kind: other(choices, getattr(thing, kind))})
    objects = list(scene.objects)
    objects[which] = thing
    return replace(scene, objects=tuple(objects))


def draw_families(num_families: int, seed: int, size: int = 4) -> tuple[torch.Tensor, list[str]]:
    """Families of pictures whose captions differ from the first one's in one attribute: uint8 (N * size, 3, 64, 64)."""
    rng = np.random.default_rng([seed, 3])
    scenes = []
    for index in range(num_families):
        first = captioned_shapes.scene(index, seed, two_object_share=0.5)
        family = {first.caption: first}
        while len(family) < size:
            other = change_one_attribute(first, rng)
            if not captioned_shapes.is_held_out(other.caption):
                family[other.caption] = other
        scenes.extend(family.values())
    pixels_NHWC = np.stack(
        [np.asarray(captioned_shapes.draw_scene(scene, [seed, i, 4])) for i, scene in enumerate(scenes)]
    )
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).contiguous(), [scene.caption for scene in scenes]


def train_text_encoder(tokenizer: CLIPTokenizer, num_steps: int, seed: int) -> CLIPTextModel:
    """A CLIPTextModel (128 wide, 3 layers) trained to match captions with pictures.

    Symmetric InfoNCE (CLIP, section 2.3) over batches of 32 families of four captions that differ in one
    attribute, plus the cross-entropy of a linear classifier of each attribute on the end token's state:
    the contrastive loss alone hardly separates shapes, and the U-Net could not tell them apart.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pixels, captions = draw_families(4000, SPLIT_SEEDS["train"] + seed)
    pixels = pixels.unflatten(0, (-1, 4))
    tokens = tokenize(tokenizer, captions).unflatten(0, (-1, 4))
    labels = {name: values.unflatten(0, (-1, 4)) for name, values in attribute_labels(captions).items()}

    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            hidden_act="gelu",
        )
    )
    project_text, project_vision = nn.Linear(TEXT_WIDTH, 64, bias=False), nn.Linear(96, 64, bias=False)
    classify = nn.ModuleDict({name: nn.Linear(TEXT_WIDTH, len(choices)) for name, choices in ATTRIBUTES.items()})
    log_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))
    parameters = [
        log_scale,
        *(p for m in (text, vision, project_text, project_vision, classify) for p in m.parameters()),
    ]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, num_steps))

    started = time.process_time()
    for step in range(num_steps):
        families = torch.randint(len(tokens), (32,), generator=generator)
        end_state = text(input_ids=tokens[families].flatten(0, 1)).pooler_output
        picture_state = vision(pixel_values=_normalise(pixels[families].flatten(0, 1))).pooler_output
        similarity = F.normalize(project_text(end_state), dim=1) @ F.normalize(project_vision(picture_state), dim=1).T
        logits, target = similarity * log_scale.clamp(max=np.log(100)).exp(), torch.arange(len(similarity))
        contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        attributes = sum(
            F.cross_entropy(classify[name](end_state), labels[name][families].flatten()) for name in ATTRIBUTES
        ) / len(ATTRIBUTES)
        loss = contrast + attributes
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(
                f"text step {step}: contrast {contrast.item():.3f}, attributes {attributes.item():.3f}, "
                f"{time.process_time() - started:.0f} CPU-seconds",
                flush=True,
            )
    return text.eval()


@torch.no_grad()
def attribute_separation(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer) -> dict[str, float]:
    """How well the end token's state separates the values of each attribute: accuracy of a nearest-mean classifier.

    Per attribute, the share of held-out captions whose state is nearest to the mean state of the training
    captions with the same value. Nothing is trained, so an attribute that hardly changes the state scores low,
    even if it is linearly separable: an untrained encoder has 21 to 99 %. One-object captions for background, color,
    shape, size, position and "all" of these at once; two-object captions for the rest and "all_2".
    """
    scores = {}
    for num_objects, suffix in ((1, ""), (2, "_2")):
        states, labels = {}, {}
        for split in ("train", "held_out"):
            captions = captioned_shapes.captions(num_objects, split)
            captions = list(captions[:: len(captions) // 2700 or 1])  # about 3,000 of two objects are enough
            labels[split] = attribute_labels(captions)
            parts = tokenize(tokenizer, captions).split(500)
            states[split] = torch.cat([text_encoder(input_ids=part).pooler_output.float() for part in parts])
        right = {}
        for name, choices in ATTRIBUTES.items():
            value = labels["train"][name]
            if value[0] >= 0:
                means = torch.stack([states["train"][value == i].mean(0) for i in range(len(choices))])
                right[name] = torch.cdist(states["held_out"], means).argmin(1) == labels["held_out"][name]
        right["all" + suffix] = torch.stack(list(right.values())).all(0)
        for name, hits in right.items():
            scores.setdefault(name, hits.float().mean().item())
    return scores


def write_model(vae, text_encoder, tokenizer, folder: Path) -> None:
    """Writes everything but the card in diffusers layout, weights in fp16."""
    copy.deepcopy(vae).half().save_pretrained(folder / "vae")
    copy.deepcopy(text_encoder).half().save_pretrained(folder / "text_encoder")
    save_tokenizer(tokenizer, folder / "tokenizer")
    DDIMScheduler(**SCHEDULER_CONFIG).save_pretrained(folder / "scheduler")
    UNet2DConditionModel(**UNET_CONFIG).save_config(folder / "unet")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        "requires_safety_checker": False,
        **dict.fromkeys(("feature_extractor", "image_encoder", "safety_checker"), [None, None]),
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def load_scores(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """`reconstruction_scores` and `attribute_separation` of the files in `folder`, computed in fp32."""
    vae = AutoencoderKL.from_pretrained(folder / "vae", dtype=torch.float32)
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    return reconstruction_scores(vae), attribute_separation(text_encoder, tokenizer)


def score_rows(reconstruction: dict[str, float], separation: dict[str, float]) -> list[tuple[str, str]]:
    """The scores as (what, value), for the card and the terminal."""
    scenes = {"one_64": "one object, 64x64", "two_64": "two objects, 64x64", "one_32": "one object, 32x32"}
    rows = [(f"PSNR, {text}", f"{reconstruction[f'psnr_{key}']:.1f} dB") for key, text in scenes.items()]
    rows += [(f"Detector, {text}", f"{reconstruction[f'detector_{key}']:.1%}") for key, text in scenes.items()]
    return rows + [(f"Separation, {name}", f"{value:.1%}") for name, value in separation.items()]


def new_card(folder: Path, seed: int, rows: list[tuple[str, str]]) -> str:
    """The model card in `folder`, with another table of scores; its other numbers are changed by hand."""
    before, head, rest = (folder / "README.md").read_text().partition("| | |\n|---|---|\n")
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return re.sub(r"--seed \d+", f"--seed {seed}", before) + head + table + "\n\n" + rest.partition("\n\n")[2]


@contextlib.contextmanager
def replaced(folder: Path, marker: str) -> Iterator[Path]:
    """A new folder, which replaces `folder` at the end, by a rename; what is interrupted changes nothing.

    ValueError if there is something else than a model, whose folder has a file `marker`.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise ValueError(f"{folder} holds something other than a model; choose an empty or a new folder for --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        new = Path(temporary) / "model"
        new.mkdir()
        yield new
        for path in (new, *new.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # some writers are stricter
        if folder.exists():
            folder.rename(new.with_name("old"))
        new.rename(folder)


def build(output: Path, seed: int = 0, effort: float = 1.0) -> None:
    """Trains and writes tiny-sd. `effort` scales the number of training steps. See `replaced` for `output`."""
    wall, cpu = time.monotonic(), time.process_time()
    vae_steps, text_steps = (max(2, round(steps * effort)) for steps in (4000, 800))
    with replaced(output, "model_index.json") as new:
        tokenizer = build_tokenizer()
        text_encoder = train_text_encoder(tokenizer, text_steps, seed)
        write_model(train_vae(vae_steps, seed), text_encoder, tokenizer, new)
        rows = score_rows(*load_scores(new))
        (new / "README.md").write_text(new_card(FOLDER, seed, rows))
    print(*(f"{what}: {value}" for what, value in rows), sep="\n")
    print(f"{time.monotonic() - wall:.0f} s, {time.process_time() - cpu:.0f} CPU-seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", type=float, default=1.0, help="scales the number of training steps")
    arguments = parser.parse_args()
    torch.set_num_threads(2)  # the same result and time on any machine
    build(arguments.output, arguments.seed, arguments.effort)


if __name__ == "__main__":
    main()
