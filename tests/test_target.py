"""What a drafter asks of its target follows what the target's own forward does, in every family."""

import pytest
import torch
from transformers import AutoConfig

from hf_domino import DominoConfig, DominoDrafter
from hf_domino.target import Target, hidden_states_request
from tests.families import FAMILIES, IMAGE_FAMILIES, WITH_POSITIONS, build_text, target_of
from tests.tiny import MASK, VOCAB, inputs, tiny_drafter, tiny_target

ALL = [*FAMILIES, *IMAGE_FAMILIES]


@torch.no_grad()
def forward(model, output_hidden_states=True):
    return model(**inputs(), output_hidden_states=output_hidden_states)


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITH_POSITIONS])
def test_embed_gives_what_the_first_layer_reads(name):
    target = target_of(name)
    torch.testing.assert_close(
        Target(target).embed(inputs()["input_ids"]), forward(target).hidden_states[0], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(WITH_POSITIONS))
def test_embed_leaves_positions_out(name):
    target = target_of(name)
    ids = inputs()["input_ids"]
    assert torch.equal(Target(target).embed(ids), target.get_input_embeddings()(ids))


@pytest.mark.parametrize("name", ALL)
def test_base_logits_are_those_of_the_target(name):
    outputs = forward(target_of(name))
    logits = Target(target_of(name)).base_logits(outputs.hidden_states[-1])
    torch.testing.assert_close(logits, outputs.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("gemma2", "final_logit_softcapping", 2.0),
        ("gemma3_text", "final_logit_softcapping", 2.0),
        ("gemma4_text", "final_logit_softcapping", 2.0),
        ("nanochat", "final_logit_softcapping", 2.0),
        ("cohere", "logit_scale", 3.0),
        ("cohere2", "logit_scale", 3.0),
        ("granite", "logits_scaling", 9.0),
        ("granite", "embedding_multiplier", 5.0),
        ("hyperclovax", "logits_scaling", 9.0),
        ("hyperclovax", "embedding_multiplier", 5.0),
        ("afmoe", "mup_enabled", False),
        ("llama", "vocab_size", 101),
        ("qwen2", "tie_word_embeddings", True),
        ("gemma2", "tie_word_embeddings", True),
    ],
)
def test_a_setting_of_the_target_is_followed(name, field, value):
    model, changed = build_text(name), build_text(name, **{field: value})
    target, outputs = Target(changed), forward(changed)
    assert not torch.equal(forward(model).logits[..., :VOCAB], outputs.logits[..., :VOCAB])
    assert torch.equal(target.embed(inputs()["input_ids"]), outputs.hidden_states[0])
    torch.testing.assert_close(target.base_logits(outputs.hidden_states[-1]), outputs.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_features_are_the_outputs_of_the_chosen_layers(name):
    target = target_of(name)
    states = forward(target).hidden_states
    asked = forward(target, hidden_states_request([2, 0])).hidden_states
    expected = torch.cat([states[3], states[1]], dim=-1)
    assert torch.equal(Target(target).features(states, [2, 0]), expected)
    assert torch.equal(Target(target).features(asked, [2, 0]), expected)


@pytest.mark.parametrize("name", [name for name in ALL if name != "opt-projected"])
def test_the_feature_of_the_last_layer_is_the_final_normed_state(name):
    target = target_of(name)
    outputs = forward(target, hidden_states_request([3]))
    feature = Target(target).features(outputs.hidden_states, [3])
    torch.testing.assert_close(Target(target).base_logits(feature), outputs.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_for_target_makes_a_drafter_that_runs(name):
    target = target_of(name)
    drafter = DominoDrafter(DominoConfig.for_target(target.config, num_hidden_layers=2, causal_state_size=16)).eval()
    assert drafter.config.mask_token_id == VOCAB - 1
    assert (drafter.config.vocab_size, drafter.config.num_target_layers) == (VOCAB, 4)
    text = target.generate(**inputs(), do_sample=False, max_new_tokens=6, assistant_model=drafter)
    assert torch.equal(text, target.generate(**inputs(), do_sample=False, max_new_tokens=6))


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_for_target_names_the_size_that_a_target_lacks(model_type):
    with pytest.raises(ValueError, match=f"'{model_type}' has no usable num_attention_heads"):
        DominoConfig.for_target(AutoConfig.for_model(model_type))


def test_for_target_refuses_an_encoder_decoder():
    with pytest.raises(ValueError, match="'t5' is an encoder-decoder"):
        DominoConfig.for_target(AutoConfig.for_model("t5"))


MISMATCHES = {
    "width": (dict(hidden_size=64), ["hidden_size is 64", "embedding width is 32"]),
    "features": (dict(target_hidden_size=48), ["target_hidden_size is 48", "hidden_size is 32"]),
    "depth": (dict(num_target_layers=9), ["num_target_layers is 9", "num_hidden_layers is 4"]),
    "layers": (
        dict(num_target_layers=None, target_layer_ids=[1, 7]),
        ["target_layer_ids are [1, 7]", "layers 0 to 3"],
    ),
    "vocabulary": (dict(vocab_size=128), ["vocab_size is 128", "vocab_size is 97"]),
}


def generate_with(drafter, target):
    return target.generate(**inputs(), max_new_tokens=4, do_sample=False, assistant_model=drafter)


@pytest.mark.parametrize("fields, messages", MISMATCHES.values(), ids=MISMATCHES)
def test_a_wrong_pairing_names_both_values(fields, messages):
    target = tiny_target()
    with pytest.raises(ValueError, match="not made for Qwen3ForCausalLM") as error:
        generate_with(tiny_drafter(target, **fields), target)
    assert [message for message in messages if message not in str(error.value)] == []


@pytest.mark.parametrize("eos", [MASK, [3, MASK]])
def test_a_mask_token_that_ends_the_targets_text_is_refused(eos):
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.generation_config.eos_token_id = eos
    with pytest.raises(ValueError) as error:
        generate_with(drafter, target)
    assert f"mask_token_id is {MASK}, the target's eos_token_id is {eos}" in str(error.value)


def test_all_that_does_not_fit_is_said_at_once():
    target = tiny_target()
    fields = {name: value for each, _ in MISMATCHES.values() for name, value in each.items()}
    drafter = tiny_drafter(target, **fields)
    target.generation_config.eos_token_id = MASK
    with pytest.raises(ValueError) as error:
        Target(target).check_pairing(drafter.config)
    found = str(error.value)
    for message in ("hidden_size is 64", "target_hidden_size is 48", "[1, 7]", "vocab_size is 128", "eos_token_id is"):
        assert message in found


def test_a_projected_last_layer_cannot_be_a_feature():
    target = target_of("opt-projected")
    with pytest.raises(ValueError, match="ends in vectors of 16 instead of 32"):
        generate_with(tiny_drafter(target, target_layer_ids=[0, 3]), target)


def test_a_target_without_an_output_head_is_refused():
    with pytest.raises(ValueError, match="Qwen3Model has no token embeddings or no output head"):
        Target(tiny_target().model)
