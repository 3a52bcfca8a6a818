"""Captions -> token ids, by the tokenizer of the text encoder."""

import functools
import html
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import CLIPTokenizer, GemmaTokenizer, PreTrainedTokenizerBase, T5Tokenizer

from .models import check_class, model_folder

# By the names in `tokenizer_config.json`. Not `AutoTokenizer`, which would load PyTorch into each transforming process.
TOKENIZERS = {made.__name__: made for made in (CLIPTokenizer, T5Tokenizer, GemmaTokenizer)}


@functools.lru_cache(maxsize=2)
def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer, loaded once per process; no code from the model's folder is ever run."""
    folder = model_folder(model, "tokenizer/*")
    config = pathlib.Path(folder, "tokenizer/tokenizer_config.json")
    name = json.loads(config.read_text()).get("tokenizer_class", "CLIPTokenizer").removesuffix("Fast")
    check_class(name, TOKENIZERS, f"{model!r} has a tokenizer")
    return TOKENIZERS[name].from_pretrained(folder, subfolder="tokenizer")


def caption_ids(captions: Sequence[str], config: Any) -> np.ndarray:
    """B captions -> (B, L) int32 token ids, cleaned and tokenized as a `PreprocessingConfig` says."""
    tokenizer = load_tokenizer(config.model_of("text_encoder"))
    cleaned = [clean(caption, config.text_cleaning) for caption in captions]
    return tokenize(cleaned, tokenizer, config.maximum_tokens)


def clean(caption: str, cleaning: str) -> str:
    """A caption as the parameter `text_cleaning` says: as diffusers' pipelines prepare prompts.

    "lower": as `PixArtSigmaPipeline` with `clean_caption=False`; "ftfy": as `PRXPipeline` with
    `skip_text_cleaning=True`; "none": as `StableDiffusionPipeline`.
    """
    if cleaning == "lower":
        return caption.lower().strip()
    if cleaning == "ftfy":
        import ftfy

        return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return caption


def tokenize(
    captions: Sequence[str], tokenizer: PreTrainedTokenizerBase, maximum_tokens: int | None = None
) -> np.ndarray:
    """B captions -> (B, L) int32 token ids, truncated or padded to the tokenizer's `model_max_length` L.

    With `maximum_tokens`, that is L, and -1 stands in place of padding.
    """
    most = maximum_tokens or tokenizer.model_max_length
    ids_BL = np.full((len(captions), most), -1, dtype=np.int32)
    if len(captions):
        padding = "max_length" if maximum_tokens is None else False
        encoded = tokenizer(list(captions), padding=padding, truncation=True, max_length=most)
        for ids_L, ids in zip(ids_BL, encoded["input_ids"], strict=True):
            ids_L[: len(ids)] = ids
    return ids_BL


def count_tokens(captions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Number of tokens of each caption before truncation, with the start and end tokens."""
    return [len(ids) for ids in tokenizer(captions, truncation=False, verbose=False)["input_ids"]]
