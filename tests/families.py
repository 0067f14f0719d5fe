"""Tiny random targets of many families, whose greedy text is varied."""

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests import tiny
from tests.tiny import VOCAB, prompt_ids

IMAGE = 90  # the token id that stands for an image patch
SIZES = dict(tiny.SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=None)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SLIDING = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
LATENT = dict(
    num_key_value_heads=4,
    head_dim=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
TIED = dict(tie_word_embeddings=True)
OWN_HEAD_DIM = dict(head_dim=...)  # computed by the family itself

# name -> fields that differ from SIZES; with the model type where that is not the name
FAMILIES = {
    "afmoe": dict(**EXPERTS, **SLIDING, mup_enabled=True),
    "bloom": dict(**TIED, initializer_range=1.2),
    "cohere": dict(logit_scale=0.25),
    "cohere2": dict(**SLIDING, logit_scale=0.25),
    "deepseek_v3": EXPERTS | LATENT,
    "ernie4_5": TIED,
    "falcon": OWN_HEAD_DIM,
    "gemma": TIED,
    "gemma2": dict(**SLIDING, query_pre_attn_scalar=8),
    "gemma3_text": dict(**SLIDING, query_pre_attn_scalar=8),
    "gemma4_text": dict(**SLIDING, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, global_head_dim=16),
    "glm4": {},
    "gpt2": TIED,
    "gpt_neox": {},
    "gpt_oss": dict(**EXPERTS, **SLIDING),
    "gptj": dict(rotary_dim=4),
    "granite": dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5),
    "llama": {},
    "llama-tied": dict(model_type="llama", **TIED),
    "mistral": dict(sliding_window=8),
    "mixtral": EXPERTS,
    "nanochat": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "opt": dict(ffn_dim=64),
    "opt-projected": dict(model_type="opt", ffn_dim=64, word_embed_proj_dim=16),
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
# Their embeddings have position information in them.
WITH_POSITIONS = {"gpt2", "opt", "opt-projected"}

_TOKENS = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
_VISION = dict(hidden_size=32, intermediate_size=64, patch_size=4, initializer_range=0.6)
_QWEN_VISION = dict(**_VISION, depth=2, num_heads=4, out_hidden_size=32)
_VIT = dict(**_VISION, num_hidden_layers=3, num_attention_heads=4)


def _text(**fields):
    return {**SIZES, **fields}


def _mrope(*section):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=list(section)))


IMAGE_FAMILIES = {
    "qwen2_5_vl": dict(
        **_TOKENS,
        text_config=_text(**_mrope(1, 1, 2)),
        vision_config=dict(**_QWEN_VISION, window_size=16, fullatt_block_indexes=[1]),
    ),
    "qwen3_vl": dict(
        **_TOKENS,
        text_config=_text(**_mrope(2, 1, 1)),
        vision_config=dict(**_QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
    "gemma3": dict(
        tie_word_embeddings=False,
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
        text_config=_text(**SLIDING, query_pre_attn_scalar=8),
        vision_config=dict(**_VIT, image_size=16),
    ),
    "llava": dict(
        image_token_index=IMAGE,
        text_config=_text(model_type="llama"),
        vision_config=dict(model_type="clip_vision_model", **_VIT, image_size=8, projection_dim=32),
    ),
}


def build(auto_class, model_type, fields):
    """A random model in float32 that never stops by itself."""
    fields = {name: value for name, value in fields.items() if value is not ...}
    torch.manual_seed(7)  # with it the greedy text of every family is varied
    model = auto_class.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    for parameter in model.parameters():
        # A weight that starts as zeros or ones would hide a step that is left out.
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            torch.nn.init.normal_(parameter.data, parameter.data.flatten()[0], 0.2)
    model.generation_config.eos_token_id = None
    return model


def build_text(name, **overrides):
    fields = {**SIZES, **FAMILIES.get(name, {}), **overrides}
    return build(AutoModelForCausalLM, fields.pop("model_type", name), fields)


@cache
def text_target(name):
    return build_text(name)


@cache
def image_target(name):
    return build(AutoModelForImageTextToText, name, IMAGE_FAMILIES[name])


def target_of(name):
    return image_target(name) if name in IMAGE_FAMILIES else text_target(name)


def image_inputs(name, text_after=3, seed=0):
    """What a processor gives for: text, one image of four tokens, text."""
    text = prompt_ids(7, seed)
    ids = torch.cat([text, torch.full((1, 4), IMAGE), text[:, :text_after]], dim=1)
    is_image = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("qwen"):
        image = dict(
            pixel_values=torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
            image_grid_thw=torch.tensor([[1, 4, 4]]),
            mm_token_type_ids=is_image,
        )
    else:
        side = IMAGE_FAMILIES[name]["vision_config"]["image_size"]
        image = dict(pixel_values=torch.randn(1, 3, side, side, generator=generator))
        if name == "gemma3":
            image["token_type_ids"] = is_image
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), **image)
