"""Trains and writes tiny-clip, a CLIP for the drawn pictures that is small enough to be part of the repository.

    python -m tests.makers.build_tiny_clip [--output helpers/models/tiny-clip] [--seed 0]

Its text tower is tiny-sd's text encoder as it is; a vision tower and both projections are trained to match captions
with pictures. It is written in transformers layout (fp16), with the scores that the model card, tiny-clip/README.md,
lists.

Sources: Radford et al. 2021 (CLIP), https://arxiv.org/abs/2103.00020; hard negatives as in Yuksekgonul et al. 2023,
https://arxiv.org/abs/2210.01936.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTextModel, CLIPTokenizer

from helpers.lesson import captioned_shapes
from helpers.production.extras import scores
from tests.makers import build_tiny_sd
from tests.makers.build_tiny_sd import ATTRIBUTES, SPLIT_SEEDS

FOLDER = Path(__file__).parents[2] / "helpers/models" / scores.TINY_CLIP
SIDE = 48  # pixels: three quarters of the drawn pictures' side are enough, in about half of the time
WIDTH = 64  # of the embeddings that both towers give
VISION = dict(
    hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE, patch_size=8
)
NUM_FAMILIES, FAMILIES_PER_STEP, NUM_STEPS = 4000, 32, 800
NUM_UNSEEN = 295  # pictures of each kind of scene that scores are computed from: all held-out captions of one object


def new_model() -> CLIPModel:
    """An untrained vision tower and projections; the text tower is tiny-sd's text encoder."""
    text = CLIPTextModel.from_pretrained(build_tiny_sd.FOLDER / "text_encoder", dtype=torch.float32)
    text_config = {name: value for name, value in text.config.to_dict().items() if name != "_name_or_path"}
    config = CLIPConfig(text_config=text_config, vision_config={**VISION, "hidden_act": "gelu"}, projection_dim=WIDTH)
    model = CLIPModel(config)
    model.text_model.load_state_dict(text.state_dict())
    return model


def processor() -> CLIPImageProcessorPil:
    shape = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size=shape, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def shrink(pixels_BCHW: torch.Tensor) -> torch.Tensor:
    """uint8 pictures of any size -> uint8 (B, 3, SIDE, SIDE), as the processor resizes them."""
    pictures = (Image.fromarray(p) for p in pixels_BCHW.permute(0, 2, 3, 1).numpy())
    small = [np.asarray(p.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for p in pictures]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).contiguous()


def spoil(pixels_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures in -1..1, half of them blurred and half with noise: generated ones are not as clean as drawn ones."""
    side = int(torch.randint(12, SIDE, (), generator=generator))
    blurred = F.interpolate(F.interpolate(pixels_BCHW, size=side, mode="area"), size=SIDE, mode="bilinear")
    blur, noisy = torch.rand(2, len(pixels_BCHW), 1, 1, 1, generator=generator)
    strength = 0.3 * (noisy - 0.5).clamp(0)
    noise = torch.randn(pixels_BCHW.shape, generator=generator)
    return torch.where(blur < 0.5, blurred, pixels_BCHW) + strength * noise


def picture_labels(captions: list[str]) -> dict[str, torch.Tensor]:
    """For each of ATTRIBUTES, the index of its value in each caption's picture; -100 if the picture has none.

    Of two objects the left or upper one comes first, whichever the caption names first: the picture does not say.
    """
    found = [captioned_shapes.attributes(caption) for caption in captions]
    return {
        name: torch.tensor([choices.index(values[name]) if name in values else -100 for values in found])
        for name, choices in ATTRIBUTES.items()
    }


def train(tokenizer: CLIPTokenizer, num_steps: int, seed: int) -> CLIPModel:
    """The trained model.

    Symmetric InfoNCE (CLIP, section 2.3) over batches of families of four captions that differ in one attribute, plus
    the cross-entropy of a linear classifier of each attribute on the vision tower's state, which is not kept.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pixels, captions = build_tiny_sd.draw_families(NUM_FAMILIES, SPLIT_SEEDS["train"] + seed)
    pixels = shrink(pixels).unflatten(0, (-1, 4))
    labels = {name: values.unflatten(0, (-1, 4)) for name, values in picture_labels(captions).items()}
    model = new_model()
    with torch.no_grad():  # the text tower stays as it is: its states are computed once
        tokens = build_tiny_sd.tokenize(tokenizer, captions).split(500)
        states = torch.cat([model.text_model(input_ids=part).pooler_output for part in tokens]).unflatten(0, (-1, 4))
    classify = nn.ModuleDict({name: nn.Linear(VISION["hidden_size"], len(c)) for name, c in ATTRIBUTES.items()})
    trained = [model.vision_model, model.visual_projection, model.text_projection, classify]
    parameters = [*(parameter for part in trained for parameter in part.parameters()), model.logit_scale]
    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.99), weight_decay=0.01)
    begun = time.process_time()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * float(build_tiny_sd.warmup_cosine(step, num_steps))
        families = torch.randint(len(pixels), (FAMILIES_PER_STEP,), generator=generator)
        pictures = spoil(pixels[families].flatten(0, 1).float() / 127.5 - 1, generator)
        seen = model.vision_model(pixel_values=pictures).pooler_output
        text = F.normalize(model.text_projection(states[families].flatten(0, 1)), dim=1)
        picture = F.normalize(model.visual_projection(seen), dim=1)
        logits = text @ picture.T * model.logit_scale.clamp(max=np.log(100)).exp()
        target = torch.arange(len(logits))
        contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        attributes = [F.cross_entropy(classify[name](seen), labels[name][families].flatten()) for name in ATTRIBUTES]
        loss = contrast + sum(attributes) / len(ATTRIBUTES)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            took = time.process_time() - begun
            print(f"step {step}: contrast {contrast.item():.3f}, loss {loss.item():.3f}, {took:.0f} CPU-s", flush=True)
    return model.eval()


def retrieval_scores(clip: scores.CLIP, seed: int = 0) -> dict[str, float]:
    """Accuracy on unseen pictures of held-out captions.

    "one object", "two objects": the share of pictures whose own caption is the nearest of NUM_UNSEEN held-out ones.
    An attribute's name: the share whose caption is nearer than the same caption with that attribute changed.
    """
    found, kinds, rng = {}, {}, np.random.default_rng([seed, 5])
    for name, num_objects in (("one object", 1), ("two objects", 2)):
        # Captions that describe the same picture ("left of" and "right of") count as one.
        held_out = captioned_shapes.captions(num_objects, "held_out")
        held_out = list({str(captioned_shapes.attributes(caption)): caption for caption in held_out}.values())
        captions = [held_out[i] for i in rng.permutation(len(held_out))[:NUM_UNSEEN]]
        scenes = [captioned_shapes.parse(caption) for caption in captions]
        seeds = [[SPLIT_SEEDS["unseen"] + seed, number, 6] for number in range(len(scenes))]
        pictures = [np.asarray(captioned_shapes.draw_scene(*what)) for what in zip(scenes, seeds, strict=True)]
        seen, texts = clip.images(pictures), clip.texts(captions)
        found[name] = float(((seen @ texts.T).argmax(1) == np.arange(len(seen))).mean())
        for _ in range(5):
            others = [build_tiny_sd.change_one_attribute(scene, rng) for scene in scenes]
            nearer = (seen * texts).sum(1) > (seen * clip.texts([other.caption for other in others])).sum(1)
            for scene, other, right in zip(scenes, others, nearer.tolist(), strict=True):
                kinds.setdefault(changed(scene, other), []).append(right)
    return found | {kind: float(np.mean(hits)) for kind, hits in sorted(kinds.items())}


def changed(scene: captioned_shapes.Scene, other: captioned_shapes.Scene) -> str:
    """The attribute in which two scenes differ."""
    one, two = (build_tiny_sd.attribute_labels([s.caption]) for s in (scene, other))
    return next(name.removesuffix("_2") for name in ATTRIBUTES if int(one[name]) != int(two[name]))


def write_model(model: CLIPModel, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Everything but the card in transformers layout, weights in fp16. `model` is fp16 afterwards."""
    model.half().save_pretrained(folder)
    build_tiny_sd.save_tokenizer(tokenizer, folder)
    processor().save_pretrained(folder)


def build(folder: Path, seed: int = 0, num_steps: int = NUM_STEPS) -> None:
    """Train and write the model; see `build_tiny_sd.replaced` for `folder`."""
    started = time.process_time()
    tokenizer = CLIPTokenizer.from_pretrained(build_tiny_sd.FOLDER / "tokenizer")
    with build_tiny_sd.replaced(folder, "preprocessor_config.json") as new:
        write_model(train(tokenizer, num_steps, seed), tokenizer, new)
        found = retrieval_scores(scores.CLIP(str(new)))
        rows = [
            (f"{'Retrieval' if 'object' in name else 'Told apart'}, {name}", f"{v:.1%}") for name, v in found.items()
        ]
        (new / "README.md").write_text(build_tiny_sd.new_card(FOLDER, seed, rows))
    print(*(f"{what}: {value}" for what, value in rows), sep="\n")
    print(f"{time.process_time() - started:.0f} CPU-seconds")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
