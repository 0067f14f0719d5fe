"""EAGLE-3 inside generate(): the drafts are those of the method, and what comes out is what the target says."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList, StaticCache

from hf_domino import Eagle3CandidateGenerator, Eagle3Config, Eagle3Drafter, track_acceptance
from hf_domino.draft_schedule import DraftSchedule

from . import test_sampling as sampling
from .families import image_inputs, target_of
from .test_assisted_generation import CACHE, HAS_STATIC_CACHE, Counting, Recorder, assert_alike, tokenizer
from .tiny import (
    VOCAB,
    assert_same_as_plain,
    drafted_rounds,
    forbid_host_synchronisation,
    inputs,
    oracle,
    prompt_ids,
    tiny_eagle3,
    tiny_target,
)
from .training.toy import MASK, SUCCESSOR, toy_target, toy_text

assert tokenizer  # a fixture
NOTHING = torch.zeros(0, dtype=torch.long)
USUAL = dict(target_layer_ids=None, num_target_layers=None)
KINDS = {
    "as published": USUAL,
    "draft vocabulary": dict(USUAL, draft_vocabulary_size=23),
    "other layers": dict(target_layer_ids=[6, 0], draft_vocabulary_size=40),
    "speculators": dict(USUAL, norm_before_residual=True, use_qk_norm=True),
    "biases and other heads": dict(
        USUAL, attention_bias=True, num_attention_heads=2, num_key_value_heads=1, head_dim=6
    ),
}


@pytest.fixture(scope="module")
def deep():
    return tiny_target(num_hidden_layers=8)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_eagle3(target, draft_vocabulary_size=50)


# The method, written once more


class Reference:
    """EAGLE-3's drafting step from the paper and the public tensors alone: everything anew for each token, no cache."""

    def __init__(self, drafter, target):
        self.weights, self.config = drafter.state_dict(), drafter.config
        self.embeddings = target.get_input_embeddings().weight

    def norm(self, name, x):
        scale = x.pow(2).mean(-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def heads(self, name, x, norm=None):
        """[T, H] -> [heads, T, head_dim], with rotary positions 0, 1, 2, ... where there may be a norm."""
        x = self.linear(f"midlayer.self_attn.{name}", x).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
        if norm is None:
            return x
        if self.config.use_qk_norm:
            x = self.norm(f"midlayer.self_attn.{norm}", x)
        real, imaginary = x.chunk(2, dim=-1)
        theta, width = self.config.rope_parameters["rope_theta"], self.config.head_dim
        speeds = theta ** (-torch.arange(0, width, 2) / width)
        turned = torch.complex(real, imaginary) * torch.exp(1j * torch.arange(x.shape[1])[:, None] * speeds)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def layer(self, embeddings, hidden):
        """[T, H], [T, H] -> [T, H]."""
        normed = self.norm("midlayer.hidden_norm", hidden)
        both = torch.cat([self.norm("midlayer.input_layernorm", embeddings), normed], dim=-1)
        query, key, value = (self.heads("q_proj", both, "q_norm"), self.heads("k_proj", both, "k_norm"), None)
        value = self.heads("v_proj", both)
        key, value = (x.repeat_interleave(len(query) // len(x), dim=0) for x in (key, value))
        scores = query @ key.transpose(1, 2) / self.config.head_dim**0.5
        ahead = torch.ones(scores.shape[1:]).triu(1).bool()
        mixed = scores.masked_fill(ahead, -float("inf")).softmax(-1) @ value
        attended = self.linear("midlayer.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        x = (normed if self.config.norm_before_residual else hidden) + attended
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate = F.silu(self.linear("midlayer.mlp.gate_proj", y)) * self.linear("midlayer.mlp.up_proj", y)
        return x + self.linear("midlayer.mlp.down_proj", gate)

    def draft(self, embeddings, features, anchor, tokens):
        """Logits [n, D] of a chain in which each of the given `tokens` [n] was chosen.

        `embeddings` [T, H] are those of the verified tokens, `features` [T, F] theirs, `anchor` the token behind them.
        """
        hidden = self.linear("fc", features)
        following = torch.cat([embeddings[1:], self.embeddings[anchor][None]])
        logits = []
        for token in tokens:
            outputs = self.layer(following, hidden)
            logits.append(self.linear("lm_head", self.norm("norm", outputs[-1])))
            hidden = torch.cat([hidden, outputs[-1:]])
            following = torch.cat([following, self.embeddings[token][None]])
        return torch.stack(logits)

    def of_a_round(self, target, ids, tokens, layers=(2, 4, 5)):
        """Logits [n, D] behind the drafts [1, n] that a round makes for `ids` [1, T].

        Features are what enters these layers; by default 2, L // 2 and L - 3 of 8, as in the authors' code.
        """
        known = ids[:, :-1]
        hidden_states = target(known, output_hidden_states=True).hidden_states
        features = torch.cat([hidden_states[i] for i in layers], dim=-1)
        return self.draft(self.embeddings[known[0]], features[0], ids[0, -1], tokens[0])

    def vocabulary(self):
        return [i + int(offset) for i, offset in enumerate(self.weights.get("d2t", torch.zeros(VOCAB)))]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_method(deep, kind):
    drafter = tiny_eagle3(deep, **KINDS[kind])
    reference, vocabulary = Reference(drafter, deep), Reference(drafter, deep).vocabulary()
    layers = (7, 1) if kind == "other layers" else (2, 4, 5)
    truth = deep.generate(**inputs(), max_new_tokens=40, do_sample=False)[0, 7:]
    with track_acceptance() as acceptance:
        rounds = drafted_rounds(deep, drafter, truth, max_new_tokens=40)
    assert max(acceptance.lengths) == 6 and min(acceptance.lengths) < 4 and len(rounds) > 8
    drafted = []
    for ids, tokens, logits in rounds:
        expected = reference.of_a_round(deep, ids, tokens, layers)
        torch.testing.assert_close(logits[0][:, vocabulary], expected, atol=1e-3, rtol=1e-3)
        assert tokens[0].tolist() == [vocabulary[i] for i in expected.argmax(-1)]
        assert logits[0].isfinite().sum(-1).tolist() == [len(vocabulary)] * len(expected)
        drafted += tokens[0].tolist()
    assert len(set(drafted)) > 4, "the drafts must vary to tell anything"


@torch.no_grad()
def test_sampled_drafts_condition_the_ones_behind_them(deep):
    drafter = tiny_eagle3(deep, **USUAL, draft_vocabulary_size=23)
    reference, vocabulary = Reference(drafter, deep), Reference(drafter, deep).vocabulary()
    torch.manual_seed(0)
    not_likeliest = 0
    for ids, tokens, logits in drafted_rounds(deep, drafter, do_sample=True, temperature=2.0, top_k=0):
        expected = reference.of_a_round(deep, ids, tokens)
        torch.testing.assert_close(logits[0][:, vocabulary] * 2.0, expected, atol=1e-3, rtol=1e-3)
        not_likeliest += (tokens != logits.argmax(-1)).sum().item()
    assert not_likeliest > 20


@torch.no_grad()
def test_what_was_seen_in_rounds_without_drafts_is_not_lost(deep, monkeypatch):
    drafts = itertools.cycle([True, False, False])
    schedule = {"begin": lambda *_: next(drafts), "cut": lambda _, confidence: len(confidence), "end": lambda *_: None}
    for name, method in schedule.items():
        monkeypatch.setattr(DraftSchedule, name, method)
    drafter = tiny_eagle3(deep, **USUAL)
    reference, truth = Reference(drafter, deep), deep.generate(**inputs(), max_new_tokens=40, do_sample=False)[0, 7:]
    rounds = drafted_rounds(deep, drafter, truth, max_new_tokens=40, num_assistant_tokens_schedule="adaptive")
    assert len(rounds) > 5
    for ids, tokens, logits in rounds:
        torch.testing.assert_close(logits[0], reference.of_a_round(deep, ids, tokens), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_a_prompt_of_embeddings_and_a_padded_one_draft_the_same(deep):
    drafter, ids = tiny_eagle3(deep, **USUAL), prompt_ids()
    embedded = dict(inputs_embeds=deep.get_input_embeddings()(ids), attention_mask=torch.ones_like(ids), input_ids=None)
    padded = torch.cat([torch.full((1, 5), 95), ids], dim=1)
    padded = dict(input_ids=padded, attention_mask=(torch.arange(12) >= 5).long()[None])
    rounds = drafted_rounds(deep, drafter, pad_token_id=95)
    for prompt in (embedded, padded):
        others = drafted_rounds(deep, drafter, pad_token_id=95, **prompt)
        assert len(others) == len(rounds)
        for (_, tokens, logits), (_, same, close) in zip(rounds, others):
            assert torch.equal(tokens, same)
            torch.testing.assert_close(logits, close, atol=1e-3, rtol=1e-3)


def test_only_verified_rows_stay_in_the_context(target, drafter, monkeypatch):
    lengths, draft = [], Eagle3CandidateGenerator.draft

    def spy(self, input_ids, count):
        drafts = draft(self, input_ids, count)
        lengths.append((self.context.length, input_ids.shape[1] - 1))
        return drafts

    monkeypatch.setattr(Eagle3CandidateGenerator, "draft", spy)
    assert_same_as_plain(target, drafter, 0.7, 30, **inputs())
    assert len(lengths) > 5 and all(length == known for length, known in lengths)


def test_no_host_synchronisation_while_drafting(target, drafter, monkeypatch):
    forbid_host_synchronisation(monkeypatch, Eagle3CandidateGenerator, "draft")
    for do_sample in (False, True):
        target.generate(**inputs(), max_new_tokens=12, do_sample=do_sample, top_k=0, assistant_model=drafter)


# A drafter that predicts


def successor_drafter(target):
    """Its layer hands on the embedding of the token that a row reads, and its head knows what follows that token."""
    config = Eagle3Config.for_target(
        target.config,
        target_layer_ids=[0, 1, 2],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=24,
        # A row attends to tokens like its own, wherever they stand.
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=1e9),
        norm_before_residual=True,
    )
    drafter, width = Eagle3Drafter(config).eval(), config.hidden_size
    with torch.no_grad():
        for linear in (module for module in drafter.modules() if isinstance(module, torch.nn.Linear)):
            linear.weight.zero_()
        layer = drafter.midlayer
        layer.hidden_norm.weight.zero_()
        for linear, scale in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 9), (layer.self_attn.v_proj, 1)):
            linear.weight[:, :width] = scale * torch.eye(width)
        layer.self_attn.o_proj.weight.copy_(torch.eye(width))
        drafter.lm_head.weight[SUCCESSOR, torch.arange(MASK - 1)] = 3.0
    return drafter


def test_long_chains_are_accepted_where_the_drafter_is_right():
    target = toy_target()
    drafter = successor_drafter(target)
    ids = torch.tensor([toy_text(3, 5)])
    kwargs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=31, do_sample=False)
    with track_acceptance() as acceptance:
        out = target.generate(**kwargs, assistant_model=drafter)
    assert out[0].tolist() == toy_text(3, 36)
    assert acceptance.drafted == [5] * 5 and acceptance.lengths == [6] * 5
    with track_acceptance() as acceptance:
        target.generate(**kwargs, assistant_model=drafter, num_assistant_tokens=14)
    assert acceptance.lengths == [15, 15]


# Settings


RATES = (1.0, 0.6)


def test_every_length(target, drafter):
    for new in range(1, 20):
        acceptance = assert_same_as_plain(target, drafter, 1.0, new, **inputs())
        assert sum(acceptance.lengths) == new - 1 and max(acceptance.drafted, default=0) <= 5


@pytest.mark.parametrize("rate", RATES)
def test_stops(target, drafter, tokenizer, rate):
    text = target.generate(**inputs(), max_new_tokens=24, do_sample=False)[0, 7:].tolist()
    for offset in (0, 3, 5, 6, 11):
        assert_same_as_plain(target, drafter, rate, **inputs(), eos_token_id=text[offset], pad_token_id=95)
        stop = {"stop_strings": [tokenizer.decode(text[offset : offset + 2])], "tokenizer": tokenizer}
        assert_same_as_plain(target, drafter, rate, **inputs(), **stop)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": list(range(0, 95))},  # hardly anything that may be drafted is allowed
        {"prefix_allowed_tokens_fn": lambda batch, ids: [i for i in range(VOCAB) if (i + len(ids)) % 3]},
        {"num_assistant_tokens": 1},
        {"num_assistant_tokens": 9},
        {"num_assistant_tokens_schedule": "adaptive"},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings(target, drafter, rate, setting):
    acceptance = assert_same_as_plain(target, drafter, rate, 24, **inputs(), **setting)
    assert rate < 1 or max(acceptance.lengths) == max(acceptance.drafted) + 1
    if "num_assistant_tokens" in setting:
        assert max(acceptance.drafted) == setting["num_assistant_tokens"]


def test_processors_act_on_drafts(target):
    """The likeliest allowed token is drafted, not one that can't be accepted."""
    rounds = drafted_rounds(target, tiny_eagle3(target), suppress_tokens=list(range(50)))
    assert len(rounds) > 10 and min(tokens.min() for _, tokens, _ in rounds) >= 50


@pytest.mark.parametrize("rate", RATES)
def test_processors_that_count_and_returned_values(drafter, rate):
    target = tiny_target(attn_implementation="eager")
    kwargs = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    kwargs |= {f"output_{name}": True for name in ("scores", "logits", "attentions", "hidden_states")}

    def call(**assistant):
        settings = {
            "logits_processor": LogitsProcessorList([counting := Counting()]),
            "streamer": (streamer := Recorder()),
        }
        return target.generate(**inputs(), **kwargs, **settings, **assistant), counting.seen, streamer.calls

    plain, seen, streamed = call()
    with oracle(plain.sequences[0, 7:], rate):
        out, seen_beside, streamed_beside = call(assistant_model=drafter)
    assert torch.equal(plain.sequences, out.sequences) and seen == seen_beside and streamed == streamed_beside
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert_alike(plain[name], out[name])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("whole_prompt", (True, False), ids=("all ids", "new ids only"))
@pytest.mark.parametrize("padding", (0, 3))
def test_the_next_turn(target, drafter, rate, whole_prompt, padding, monkeypatch):
    """A cache that is continued: the same text, and the drafter goes on with its context as if it had read all anew."""
    ids = torch.cat([torch.full((1, padding), 95), prompt_ids()], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    logits, draft = [], Eagle3CandidateGenerator.draft

    def spy(self, *args):
        drafts = draft(self, *args)
        logits.append(torch.cat(self.chosen_from))
        return drafts

    monkeypatch.setattr(Eagle3CandidateGenerator, "draft", spy)

    def generate(assistant=None, truth=NOTHING, **prompt):
        logits.clear()
        kwargs = {"do_sample": False, "pad_token_id": 95, "return_dict_in_generate": True, **prompt}
        with oracle(truth, rate):
            out = target.generate(**kwargs, assistant_model=assistant)
        return out, list(logits)

    opening = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20}
    begun = generate(**opening)[0].sequences[0, ids.shape[1] :]
    stop = begun[4].item()  # in the middle of a chain that is accepted
    longer = torch.cat([ids, begun[None, :5], torch.tensor([[5, 6, 7]])], dim=1)
    longer_mask = torch.cat([mask, torch.ones(1, 8, dtype=torch.long)], dim=1)
    prompt = {"input_ids": longer, "attention_mask": longer_mask, "max_new_tokens": 12}
    text = generate(**prompt)[0].sequences[:, longer.shape[1] :]
    _, fresh = generate(drafter, text[0], **prompt)
    for first, second in ((None, drafter), (drafter, drafter), (drafter, None)):
        turn, _ = generate(first, begun, **opening, eos_token_id=stop)
        assert torch.equal(turn.sequences, longer[:, :-3])
        given = longer if whole_prompt else longer[:, turn[CACHE].get_seq_length() :]
        out, continued = generate(second, text[0], **{**prompt, "input_ids": given, CACHE: turn[CACHE]})
        assert torch.equal(out.sequences[:, given.shape[1] :], text)
        assert out[CACHE].get_seq_length() == longer.shape[1] + 12 - 1
        if first and second:
            torch.testing.assert_close(continued, fresh, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rate", RATES)
def test_other_caches(target, drafter, rate):
    sliding = tiny_target(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert_same_as_plain(sliding, drafter, rate, **inputs(20))
    if HAS_STATIC_CACHE:
        assert_same_as_plain(target, drafter, rate, **inputs(), cache_implementation="static")
        plain = target.generate(**inputs(), max_new_tokens=24, do_sample=False)
        cache = StaticCache(config=target.config, max_cache_len=7 + 24)
        with oracle(plain[0, 7:], rate):
            kwargs = {"max_new_tokens": 24, "do_sample": False, CACHE: cache}
            assert torch.equal(plain, target.generate(**inputs(), **kwargs, assistant_model=drafter))


@pytest.mark.parametrize("name", ["bloom", "gemma2", "gpt2", "granite", "llama-tied", "opt-projected", "qwen3_vl"])
def test_families(name):
    target = target_of(name)
    drafter, before = tiny_eagle3(target), copy.deepcopy(target.generation_config)
    ids, mask = inputs().values()
    for prompt in (inputs(), dict(inputs_embeds=target.get_input_embeddings()(ids).detach(), attention_mask=mask)):
        acceptance = assert_same_as_plain(target, drafter, 0.8, **prompt)
        assert acceptance.mean > 2
    assert target.generation_config == before


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava"])
def test_images(name):
    target = target_of(name)
    assert assert_same_as_plain(target, tiny_eagle3(target), 0.8, **image_inputs(name)).mean > 2


def test_attention_implementations(target):
    drafter = tiny_eagle3(target)
    rounds = drafted_rounds(target, drafter)
    for name in ("eager", "flex_attention"):
        drafter.set_attn_implementation(name)
        for (_, _, logits), (_, _, close) in zip(rounds, drafted_rounds(target, drafter)):
            torch.testing.assert_close(logits, close, atol=1e-4, rtol=1e-4)


def test_drafting_leaves_no_state_on_the_drafter(target, drafter):
    before, attributes = copy.deepcopy(drafter.state_dict()), set(vars(drafter))
    assert_same_as_plain(target, drafter, **inputs())
    assert set(vars(drafter)) == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_another_dtype_than_the_target(target, dtype):
    assert_same_as_plain(target, tiny_eagle3(target).to(dtype), 0.8, **inputs())


def test_autocast_and_inference_mode(target, drafter):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        out = target.generate(**inputs(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert out.shape == (1, 19)


# Sampling


@pytest.mark.parametrize("name", ["plain", "top-p, temperature and penalty"])
@pytest.mark.parametrize("draft_vocabulary_size", (None, 4))
def test_the_targets_distribution(name, draft_vocabulary_size):
    target = sampling.sampling_target()
    drafter = tiny_eagle3(target, target_layer_ids=[0], draft_vocabulary_size=draft_vocabulary_size, num_draft_tokens=2)
    kwargs = sampling.kwargs_of(sampling.SETTINGS[name])
    exact = sampling.exact_distribution(target, kwargs)
    with track_acceptance() as acceptance:
        counts = sampling.draw(target, drafter, kwargs, draws=400)
    assert 1.05 < acceptance.mean < max(acceptance.drafted) + 1, "drafts must be accepted and rejected"
    mean, deviation = sampling.sampling_noise(exact, 400)
    assert sampling.total_variation(counts, exact) < mean + 4 * deviation


# Refusals


@pytest.mark.parametrize(
    "setting, named",
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_assistant_tokens": 65}, "from 1 to 64.*is 65"),
        ({"num_assistant_tokens": 0}, "from 1 to 64.*is 0"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "heuristic"),
        ({"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": None}, "batch of 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_by_name(target, drafter, setting, named):
    with pytest.raises(ValueError, match=named):
        target.generate(**{**inputs(), "max_new_tokens": 4, **setting}, assistant_model=drafter)


def test_a_drafter_for_another_target_is_refused(target):
    other = tiny_target(hidden_size=48, vocab_size=80, num_hidden_layers=6)
    with pytest.raises(ValueError) as error:
        target.generate(**inputs(), assistant_model=tiny_eagle3(other, target_layer_ids=[1, 2, 5]))
    for part in ("target_hidden_size is 48", "hidden_size is 32", "vocab_size is 80", "is 97", "[1, 2, 5]", "0 to 3"):
        assert part in str(error.value)


def test_a_target_too_shallow_for_the_usual_layers(target):
    shallow = tiny_target(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"target_layer_ids are \[1, 0, -1\], the target has layers 0 to 2"):
        shallow.generate(**inputs(), assistant_model=tiny_eagle3(shallow, **USUAL))
    assert_same_as_plain(target, tiny_eagle3(target, **USUAL), **inputs())  # 4 layers: two of the three are the same
