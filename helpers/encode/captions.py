"""Captions -> token ids, by the text encoder's tokenizer."""

import functools
import html
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import transformers

from ..config import PreprocessingConfig
from .models import check_class, model_folder

# By the names in `tokenizer_config.json`. `AutoTokenizer` would load PyTorch into each process that transforms rows.
TOKENIZERS = ("CLIPTokenizer", "T5Tokenizer", "GemmaTokenizer")


@functools.lru_cache(maxsize=2)
def load_tokenizer(model: str) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a model, loaded once per process; no code from the model's folder is run."""
    folder = model_folder(model, "tokenizer/*")
    config = pathlib.Path(folder, "tokenizer/tokenizer_config.json")
    name = json.loads(config.read_text()).get("tokenizer_class", "CLIPTokenizer").removesuffix("Fast")
    check_class(name, TOKENIZERS, f"{model!r} has a tokenizer")
    return getattr(transformers, name).from_pretrained(folder, subfolder="tokenizer")


def caption_ids(captions: Sequence[str], config: PreprocessingConfig) -> np.ndarray:
    """B captions -> (B, L) int32 token ids, cleaned (`clean`) and truncated to L.

    L is `config.maximum_tokens`; shorter captions are filled up with -1. If that is None, L is the tokenizer's
    `model_max_length`, and shorter captions are filled up with padding tokens.
    """
    tokenizer, padding = load_tokenizer(config.model_of("text_encoder")), config.maximum_tokens is None
    most = config.maximum_tokens or tokenizer.model_max_length
    ids_BL = np.full((len(captions), most), -1, dtype=np.int32)
    if len(captions):
        cleaned = [clean(caption, config.text_cleaning) for caption in captions]
        encoded = tokenizer(cleaned, padding="max_length" if padding else False, truncation=True, max_length=most)
        for ids_L, ids in zip(ids_BL, encoded["input_ids"], strict=True):
            ids_L[: len(ids)] = ids
    return ids_BL


def clean(caption: str, cleaning: str) -> str:
    """A caption, cleaned as a pipeline of diffusers cleans prompts.

    `cleaning`: "none" for `StableDiffusionPipeline`, "ftfy" for `PRXPipeline` with `skip_text_cleaning=True`.
    """
    if cleaning == "ftfy":
        import ftfy

        return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return caption
