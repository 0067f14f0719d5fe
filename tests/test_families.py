"""Targets of many families: the same text with a drafter as without, or a refusal that names why."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from hf_domino import track_acceptance
from hf_domino.assisted_generation import _CACHE as CACHE
from tests.families import EXPERTS, FAMILIES, IMAGE_FAMILIES, SIZES, build, image_inputs, target_of
from tests.tiny import VOCAB, assert_same_as_plain, inputs, no_forward, oracle, prompt_ids, tiny_drafter

RATES = (1.0, 0.8, 0.3)


def assert_same_at_every_rate(name, **prompt):
    target = target_of(name)
    drafter = tiny_drafter(target)
    settings = copy.deepcopy(target.generation_config)
    for rate in RATES:
        acceptance = assert_same_as_plain(target, drafter, rate, **prompt)
        if rate == 1.0:
            assert set(acceptance.lengths[:-1]) == {drafter.config.num_draft_tokens + 1}
    assert target.generation_config == settings


def continuation(target, **prompt):
    return target.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGE_FAMILIES])
def test_the_text_is_varied_and_the_same(name):
    assert len(set(continuation(target_of(name), **inputs()))) > 5
    assert_same_at_every_rate(name, **inputs())


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGE_FAMILIES])
def test_sampling_the_likeliest_token_is_greedy_decoding(name):
    greedy = continuation(target_of(name), **inputs())
    prompt = dict(inputs(), do_sample=True, top_k=1, assistant_model=tiny_drafter(target_of(name)))
    assert target_of(name).generate(**prompt, max_new_tokens=8)[0, 7:].tolist() == greedy[:8]


@pytest.mark.parametrize("name", ["bloom", "gemma", "gemma4_text", "granite", "opt-projected", "qwen3_vl"])
def test_a_prompt_of_embeddings(name):
    ids, mask = inputs().values()
    prompt = dict(inputs_embeds=target_of(name).get_input_embeddings()(ids).detach(), attention_mask=mask)
    assert_same_at_every_rate(name, **prompt)


@pytest.mark.parametrize("types", [[1, 1, 1, 2, 2, 2, 3], [3, 2, 3, 2, 3, 2, 2]])
def test_new_tokens_have_the_token_type_of_the_last_one(types):
    prompt = dict(inputs(), token_type_ids=torch.tensor([types]))
    assert continuation(target_of("gpt2"), **prompt) != continuation(target_of("gpt2"), **inputs())
    assert_same_at_every_rate("gpt2", **prompt)


@pytest.mark.parametrize("text_after", [3, 0], ids=["text_after_the_image", "the_image_ends_the_prompt"])
@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_an_image_in_the_prompt(name, text_after):
    prompt = image_inputs(name, text_after)
    other_image = {**prompt, "pixel_values": -prompt["pixel_values"]}
    assert continuation(target_of(name), **prompt) != continuation(target_of(name), **other_image)
    assert_same_at_every_rate(name, **prompt)


def next_turn(prompt, turn):
    """What follows an answer: its cache, and the whole conversation with a new question."""
    ids = torch.cat([turn.sequences, prompt_ids(5, seed=4)], dim=1)
    types = {name: value for name, value in prompt.items() if name.endswith("token_type_ids")}
    types = {name: torch.nn.functional.pad(value, (0, ids.shape[1] - value.shape[1])) for name, value in types.items()}
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), **types, **{CACHE: turn[CACHE]})


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_a_second_turn_after_an_image(name):
    target, prompt = target_of(name), image_inputs(name)
    drafter = tiny_drafter(target)
    settings = dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True)

    def assisted(prompt, plain):
        with oracle(plain.sequences[0, prompt["input_ids"].shape[1] :]), track_acceptance() as acceptance:
            turn = target.generate(**prompt, **settings, assistant_model=drafter)
        assert max(acceptance.lengths) > 1
        return turn

    plain = target.generate(**prompt, **settings)
    ours = assisted(prompt, plain)
    plain = target.generate(**next_turn(prompt, plain), **settings)
    ours = assisted(next_turn(prompt, ours), plain)
    assert torch.equal(ours.sequences, plain.sequences)


LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
HYBRID = dict(layer_types=["linear_attention", "full_attention"] * 2)
CONVOLUTIONS = dict(layer_types=["conv", "full_attention"] * 2)
SHARED_EXPERT = dict(EXPERTS, shared_expert_intermediate_size=16)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4)
PER_LAYER = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=0)
T5 = dict(d_kv=8, d_ff=64, num_decoder_layers=4, decoder_start_token_id=0)
BART = dict(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=0)
OVER_CONVOLUTIONS = {**IMAGE_FAMILIES["llava"], "text_config": {**SIZES, **CONVOLUTIONS, "model_type": "lfm2"}}

# name -> how it is built, what the refusal says
REFUSED = {
    "qwen3_next": (AutoModelForCausalLM, {**LINEAR, **HYBRID, **SHARED_EXPERT}, "recurrent state"),
    "qwen3_5_text": (AutoModelForCausalLM, {**LINEAR, **HYBRID}, "recurrent state"),
    "mamba": (AutoModelForCausalLM, dict(state_size=8), "recurrent state"),
    "rwkv": (AutoModelForCausalLM, dict(attention_hidden_size=32), "recurrent state"),
    "bamba": (AutoModelForCausalLM, dict(**MAMBA2, attn_layer_indices=[1, 3]), "recurrent state"),
    "lfm2": (AutoModelForCausalLM, CONVOLUTIONS, "LinearAttentionLayer in the cache"),
    "llava": (AutoModelForImageTextToText, OVER_CONVOLUTIONS, "LinearAttentionLayer in the cache"),
    "minimax": (AutoModelForCausalLM, {**HYBRID, **EXPERTS}, "keeps no cache"),
    "openai-gpt": (AutoModelForCausalLM, {}, "keeps no cache"),
    "t5": (AutoModelForSeq2SeqLM, T5, "encoder-decoder"),
    "bart": (AutoModelForSeq2SeqLM, BART, "encoder-decoder"),
    "gemma3n_text": (AutoModelForCausalLM, PER_LAYER, "altup_num_inputs=4"),
    "hy_v4": (AutoModelForCausalLM, EXPERTS, "hc_mult=4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drafted_for_is_refused_before_any_work(name):
    auto_class, fields, reason = REFUSED[name]
    target = build(auto_class, name, {**SIZES, **fields})
    drafter = tiny_drafter(target_of("llama"))
    with no_forward(), pytest.raises(ValueError, match=type(target).__name__) as error:
        target.generate(**inputs(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert reason in str(error.value)
