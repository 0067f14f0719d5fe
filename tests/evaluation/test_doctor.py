"""A drafter that is fine until it is broken on purpose: the doctor must name what was broken."""

import copy
import json
import math
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoConfig, DominoDrafter
from hf_domino.cli import main
from hf_domino.evaluation.doctor import diagnose, measure, replay, with_setting
from tests.tiny import no_forward, tiny_drafter, tiny_target
from tests.training import toy
from tests.training.test_data import END, THINKING, WORDS, tiny_tokenizer

CYCLE, FORWARD, BACKWARD = 21, 22, 21
WRONG_ROPE = {"rope_type": "default", "rope_theta": 1.5}


def direction_text(direction, start, length):
    """The first token says which way round the tokens go, so that a drafter needs the target's features."""
    step = 5 if direction == FORWARD else -4
    return [direction, *((start + i * step) % CYCLE for i in range(length - 1))]


def direction_target():
    """A target that has learned the language: what its layers give differs from layer to layer."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=toy.VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            max_position_embeddings=256,
            initializer_range=0.15,
        )
    )
    texts = torch.tensor([direction_text(way, i, 28) for way in (FORWARD, BACKWARD) for i in range(CYCLE)])
    optimizer = torch.optim.AdamW(target.parameters(), 3e-3, weight_decay=0.0)
    for _ in range(150):
        logits = target(input_ids=texts).logits[:, 1:-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, texts[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def target():
    return direction_target()


@pytest.fixture(scope="module")
def drafter(target):
    texts = [direction_text(way, i, 24 + i % 5) for way in (FORWARD, BACKWARD) for i in range(CYCLE)]
    records = [{"input_ids": text, "loss_mask": [0] * 2 + [1] * (len(text) - 2)} for text in texts]
    drafter = toy.toy_drafter(target, target_layer_ids=[0, 2])
    with mock.patch.object(toy, "toy_records", lambda: records):
        toy.toy_training(drafter, toy.frozen(target), steps=150)
    return drafter.eval()


def examine(target, drafter, **kwargs):
    prompts = [direction_text(way, start, 2) for way, start in ((FORWARD, 3), (BACKWARD, 11))]
    return diagnose(target, drafter, prompts=prompts, **{"max_new_tokens": 24, "probe_below": 4, **kwargs})


def found(diagnosis, subject):
    (finding,) = (finding for finding in diagnosis.findings if finding.subject == subject)
    return finding


def test_a_healthy_pair_is_left_alone(target, drafter):
    diagnosis = examine(target, drafter)
    assert diagnosis.is_healthy and diagnosis.acceptance > 4 and not diagnosis.neighbours
    assert len(diagnosis.by_prompt) == 2 and found(diagnosis, "acceptance").verdict == "ok"


@pytest.mark.parametrize(
    "cause, field, value",
    [
        ("layer offset", "target_layer_ids", [1, 3]),
        ("layer order", "target_layer_ids", [2, 0]),
        ("alignment", "sample_from_anchor", False),
        ("mask token", "mask_token_id", 5),
        ("rope", "rope_parameters", WRONG_ROPE),
    ],
)
def test_what_was_broken_is_named(target, drafter, cause, field, value):
    healthy, weights = examine(target, drafter).acceptance, copy.deepcopy(drafter.state_dict())
    config = DominoConfig.from_dict({**drafter.config.to_dict(), field: value})
    broken = DominoDrafter(config).eval()
    broken.load_state_dict(weights)
    diagnosis = examine(target, broken)
    assert not diagnosis.is_healthy and diagnosis.acceptance < 3
    assert diagnosis.better.cause == cause and diagnosis.better.acceptance == healthy
    advice = found(diagnosis, "acceptance").advice
    assert f"{healthy:.2f}, not {diagnosis.acceptance:.2f}" in advice and f"{field} = " in advice
    assert "clearly better" in str(diagnosis)
    # Looking changed nothing.
    assert broken.config == config and examine(target, broken, probe_below=0).acceptance == diagnosis.acceptance


def test_a_neighbour_shares_the_weights(drafter):
    neighbour = with_setting(drafter, "rope_parameters", WRONG_ROPE)
    assert neighbour.fc is drafter.fc and neighbour.layers is drafter.layers
    assert not torch.equal(neighbour.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    assert drafter.config.rope_parameters != WRONG_ROPE == neighbour.config.rope_parameters


def test_a_replay_gives_the_lengths_of_generate(target, drafter):
    prompts = [direction_text(FORWARD, 3, 2), direction_text(BACKWARD, 11, 5)]
    for value in ([0, 2], [1, 3], [2, 0]):
        neighbour = with_setting(drafter, "target_layer_ids", value)
        tau, _, texts = measure(target, neighbour, prompts, 40)
        assert replay(target, neighbour, prompts, texts) == pytest.approx(tau)


def test_an_untrained_drafter_is_called_that(target):
    diagnosis = examine(target, toy.toy_drafter(target, target_layer_ids=[0, 2]).eval(), probe_below=1.3)
    assert not diagnosis.is_healthy and diagnosis.acceptance < 1.3
    assert diagnosis.neighbours and diagnosis.better is None
    advice = found(diagnosis, "acceptance").advice
    assert "no neighbour is clearly better" in advice and "not trained" in advice
    causes = ["layer offset", "alignment", "rope", "mask token", "thinking mode", "another target"]
    assert sorted(causes, key=advice.index) == causes


def test_the_drafter_of_another_target_is_reported_without_running(drafter):
    with no_forward():
        diagnosis = examine(tiny_target(), drafter)
    assert not diagnosis.is_healthy and math.isnan(diagnosis.acceptance)
    assert "vocab_size is 24, the target's vocab_size is 97" in found(diagnosis, "pairing").text


def test_return_dict_is_named_without_running():
    target = tiny_target()
    target.config.return_dict = False
    with no_forward():
        diagnosis = diagnose(target, tiny_drafter(target), prompts=[[1, 2]])
    assert found(diagnosis, "return_dict").verdict == "wrong"


def test_what_generate_refuses_is_a_finding(target, drafter):
    with mock.patch.object(target.generation_config, "num_beams", 3):
        diagnosis = examine(target, drafter)
    assert found(diagnosis, "generate()").verdict == "wrong" and "beam" in found(diagnosis, "generate()").text


def test_short_answers(target, drafter):
    diagnosis = examine(target, drafter, max_new_tokens=2)
    assert diagnosis.is_healthy and found(diagnosis, "acceptance").verdict == "look"
    # The neighbour that is right drafts the whole answer in its first round.
    diagnosis = examine(target, with_setting(drafter, "sample_from_anchor", False), max_new_tokens=6)
    assert diagnosis.better.cause == "alignment" and diagnosis.better.acceptance == 5


def test_types_special_ids_and_layers_are_worth_a_look():
    target = tiny_target(eos_token_id=3)
    drafter = tiny_drafter(target, eos_token_id=4, target_layer_ids=[1, 3]).to(torch.bfloat16)
    diagnosis = diagnose(target, drafter, prompts=[[1, 2]], max_new_tokens=4, probe_below=0)
    assert "bfloat16" in found(diagnosis, "dtype").text and found(diagnosis, "dtype").verdict == "look"
    assert "eos_token_id 3 and 4" in found(diagnosis, "special ids").text
    assert "final norm" in found(diagnosis, "layers").advice
    assert found(diagnosis, "device").verdict == "ok"
    target = tiny_target(num_hidden_layers=8)
    drafter = tiny_drafter(target, target_layer_ids=[2, 6])  # [1, 5] is what a drafter has by default
    diagnosis = diagnose(target, drafter, prompts=[[1, 2]], max_new_tokens=4, probe_below=0)
    assert "embeddings counted" in found(diagnosis, "layers").advice


@pytest.fixture(scope="module")
def chat_target():
    """Its vocabulary is padded, as that of most."""
    target = tiny_target(vocab_size=len(WORDS) + 3)
    target.generation_config.eos_token_id = END
    return target


@pytest.mark.parametrize(
    "mask, verdict",
    [(WORDS.index("w9"), "look"), (WORDS.index("<pad>"), "ok"), (len(WORDS), "ok")],
)
def test_mask_token(chat_target, mask, verdict):
    drafter = tiny_drafter(chat_target, mask_token_id=mask)
    diagnosis = diagnose(chat_target, drafter, tiny_tokenizer(), ["w1 w2"], 12, probe_below=0)
    assert found(diagnosis, "mask token").verdict == verdict
    assert found(diagnosis, "chat template").verdict == found(diagnosis, "tokenizer").verdict == "ok"


def test_thinking_modes_are_compared(chat_target):
    tokenizer = tiny_tokenizer(THINKING)
    diagnosis = diagnose(chat_target, tiny_drafter(chat_target), tokenizer, ["w1 w2"], 12, probe_below=9)
    tried = [neighbour.change for neighbour in diagnosis.neighbours if neighbour.cause == "thinking mode"]
    assert tried == ["enable_thinking = False"]  # it is on by default here
    assert found(diagnosis, "chat template").verdict == "look"
    tried = [neighbour.change for neighbour in diagnosis.neighbours if neighbour.cause == "mask token"]
    assert f"mask_token_id = {len(WORDS)}" in tried


def test_without_a_chat_template_and_with_another_tokenizer(chat_target):
    diagnosis = diagnose(chat_target, tiny_drafter(chat_target), tiny_tokenizer(None), ["w1 w2"], 12, probe_below=0)
    assert found(diagnosis, "chat template").verdict == "look" and diagnosis.by_prompt
    other = tiny_tokenizer(words=[*WORDS, *(f"x{i}" for i in range(90))], eos_token="w1")
    diagnosis = diagnose(chat_target, tiny_drafter(chat_target), other, ["w1 w2"], 12, probe_below=0)
    assert "another model's" in found(diagnosis, "tokenizer").advice


def test_the_command(chat_target, tmp_path, capsys):
    chat_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(chat_target).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w3"}) + "\n" for i in range(5)))
    command = ["doctor", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "2", "--max-new-tokens", "12"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--device", "cpu"])
    assert stop.value.code == 1
    report = capsys.readouterr().out
    assert "wrong  acceptance: 1." in report and "alignment: sample_from_anchor = False" in report
    assert len(report.split("by prompt ")[1].split("\n")[0].split(", ")) == 2
