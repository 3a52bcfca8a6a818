"""Tiny models with random weights in diffusers layout, of each class of autoencoder and text encoder.

`tiny_model(folder, vae=..., text=...)` writes one. Each of `WORDS` is one token of T5's; of Gemma's each letter is one.
"""

import json
import pathlib

import torch
from diffusers import AutoencoderDC, AutoencoderKL
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
    T5GemmaConfig,
    T5Tokenizer,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from helpers.encode import captions

CHANNELS = {"AutoencoderKL": 16, "AutoencoderDC": 8}  # of the latents
DOWNSAMPLING = {"AutoencoderKL": 4, "AutoencoderDC": 8}
WIDTH, MOST_TOKENS = 32, 24  # of the embeddings; what the tokenizers say that their models take
WORDS = [  # of the drawn pictures' captions, and some more
    *("a", "the", "at", "in", "on", "of", "and", "above", "two", "small", "large", "circle", "square", "triangle"),
    *("left", "right", "top", "bottom", "center", "background", "black", "white", "red", "green", "blue"),
    *("yellow", "purple", "cyan"),
]
PIPELINES = {
    "CLIPTextModel": ("StableDiffusionPipeline", "CLIPTokenizer"),
    "T5EncoderModel": ("PRXPipeline", "T5Tokenizer"),
    "T5GemmaEncoder": ("PRXPipeline", "GemmaTokenizer"),
}


def tiny_model(folder, vae="AutoencoderKL", text="CLIPTextModel", seed=0, **vae_options):
    """Write a model's `vae/`, `text_encoder/`, `tokenizer/` and `model_index.json`; returns the folder as a text.

    `vae_options`: changes of the autoencoder's config.
    """
    folder = pathlib.Path(folder)
    torch.manual_seed(seed)
    VAES[vae](**vae_options).save_pretrained(folder / "vae")
    TEXTS[text](folder)
    pipeline, tokenizer = PIPELINES[text]
    index = {
        "_class_name": pipeline,
        "vae": ["diffusers", vae],
        "text_encoder": ["transformers", text],
        "tokenizer": ["transformers", tokenizer],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


def kl(**options):
    """16 channels, a shift, and no convolutions around the latents, as Flux's."""
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    plain = {"use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False}
    values = {
        **{"block_out_channels": [8, 16, 16], "latent_channels": CHANNELS["AutoencoderKL"], "norm_num_groups": 4},
        **{"layers_per_block": 1, "scaling_factor": 0.36, "shift_factor": 0.11, **blocks, **plain},
    }
    return AutoencoderKL(**{**values, **options})


def dc(**options):
    """Residual blocks, and one of linear attention, as Sana's."""
    blocks, layers = ["ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"], [1, 1, 1, 1]
    scales, channels = [[], [], [], [5]], [8, 16, 16, 32]
    values = {
        **{"latent_channels": CHANNELS["AutoencoderDC"], "attention_head_dim": 8, "scaling_factor": 0.41},
        **{"encoder_block_types": blocks, "encoder_block_out_channels": channels},
        **{"encoder_layers_per_block": layers, "encoder_qkv_multiscales": scales},
        **{"decoder_block_types": blocks, "decoder_block_out_channels": channels},
        **{"decoder_layers_per_block": layers, "decoder_qkv_multiscales": scales},
    }
    return AutoencoderDC(**{**values, **options})


def clip(folder):
    """With tiny-sd's tokenizer."""
    tokenizer = captions.load_tokenizer("tiny-sd")
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=MOST_TOKENS, **sizes, **ids)
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")


def t5(folder):
    letters = [chr(number) for number in range(33, 127)]
    pieces = ["<pad>", "</s>", "<unk>", "▁", *letters, *(f"▁{word}" for word in WORDS)]
    scores = [0.0] * 3 + [-9.0] * (1 + len(letters)) + [-2.0] * len(WORDS)
    vocab = list(dict.fromkeys(zip(pieces, scores, strict=True)))
    tokenizer = T5Tokenizer(vocab, extra_ids=0, model_max_length=MOST_TOKENS)
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", is_encoder_decoder=False, **sizes)
    T5EncoderModel(config).save_pretrained(folder / "text_encoder")


def t5_gemma(folder):
    """The config describes encoder and decoder, as in the published pipelines."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    vocab = {token: number for number, token in enumerate([*special, *(chr(number) for number in range(33, 127))])}
    tokenizer = GemmaTokenizer(vocab, [], model_max_length=MOST_TOKENS, add_bos_token=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {
        **{"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8},
    }
    config = T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=len(tokenizer))
    T5GemmaEncoder(config.encoder).save_pretrained(folder / "text_encoder")
    values = {**config.to_dict(), "architectures": ["T5GemmaEncoder"]}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(values))


VAES = {"AutoencoderKL": kl, "AutoencoderDC": dc}
TEXTS = {"CLIPTextModel": clip, "T5EncoderModel": t5, "T5GemmaEncoder": t5_gemma}
