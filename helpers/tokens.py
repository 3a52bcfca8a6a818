"""Captions -> token ids. Apart from `encoder`, so that the CPU tasks that call it need not load PyTorch."""

import functools
import pathlib

import numpy as np
from transformers import CLIPTokenizer

TINY_SD = "tiny-sd"


def model_path(model):
    """The folder or hub id behind an `encoder_model` parameter; "tiny-sd" is the model in this package."""
    return str(pathlib.Path(__file__).parent / TINY_SD) if model == TINY_SD else model


@functools.lru_cache(maxsize=2)
def load_tokenizer(model):
    """The tokenizer, loaded once a process; no code from the model's folder is ever run."""
    return CLIPTokenizer.from_pretrained(model_path(model), subfolder="tokenizer")


def tokenize(captions, tokenizer):
    """B captions -> (B, L) int32 token ids, cut and padded to the tokenizer's `model_max_length` L."""
    if len(captions) == 0:
        return np.zeros((0, tokenizer.model_max_length), dtype=np.int32)
    encoded = tokenizer(list(captions), padding="max_length", truncation=True, max_length=tokenizer.model_max_length)
    return np.array(encoded["input_ids"], dtype=np.int32)


def count_tokens(captions, tokenizer):
    """Token ids of each whole caption, with begin and end, nothing cut off."""
    return [len(ids) for ids in tokenizer(captions, truncation=False, verbose=False)["input_ids"]]
