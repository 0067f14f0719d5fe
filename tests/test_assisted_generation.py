"""generate() with a drafter gives what generate() without it gives: the settings, one by one."""

import copy
import functools
import pickle
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_domino
from hf_domino import assisted_generation, track_acceptance

from .tiny import (
    MASK,
    VOCAB,
    assert_same_as_plain,
    drafted_rounds,
    inputs,
    oracle,
    prompt_ids,
    tiny_drafter,
    tiny_target,
)

RATES = (1.0, 0.8, 0.3)
CACHE = assisted_generation._CACHE
HAS_STATIC_CACHE = CACHE == "cache"  # earlier versions refuse it in assisted decoding


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture(scope="module")
def tokenizer():
    """One printable character for each token, then two special ones."""
    characters = {chr(32 + i): i for i in range(95)}
    backend = Tokenizer(models.BPE({**characters, "<pad>": 95, "<mask>": 96}, [], fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>", eos_token="~")


def plain_text(target, **kwargs):
    return target.generate(**{**inputs(), "do_sample": False, "max_new_tokens": 24, **kwargs})


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


# Lengths and stops


@pytest.mark.parametrize("rate", RATES)
def test_every_length(target, drafter, rate):
    for max_new_tokens in range(1, 26):
        assert_same_as_plain(target, drafter, rate, max_new_tokens, **inputs())


def test_max_length_boundaries(target, drafter):
    for extra in (1, 2, 9, 10):
        kwargs = {"max_new_tokens": None, "max_length": 7 + extra}
        acceptance = assert_same_as_plain(target, drafter, 1.0, **inputs(), **kwargs)
        assert sum(acceptance.lengths) == extra - 1


def test_nothing_is_drafted_beyond_the_room(target, drafter):
    acceptance = assert_same_as_plain(target, drafter, 1.0, max_new_tokens=12, **inputs())
    assert acceptance.drafted == [8, 1] and acceptance.lengths == [9, 2]


@pytest.mark.parametrize("rate", RATES)
def test_eos_at_every_offset(target, drafter, rate):
    text = plain_text(target)[0, 7:].tolist()
    for offset in range(18):
        late_and_early = [MASK - 1, text[offset]]
        out = assert_same_as_plain(target, drafter, rate, **inputs(), eos_token_id=text[offset], pad_token_id=95)
        assert sum(out.lengths) <= offset
        assert_same_as_plain(target, drafter, rate, **inputs(), eos_token_id=late_and_early, pad_token_id=95)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("setting", ("min_new_tokens", "min_length"))
def test_minimum_lengths(target, drafter, rate, setting):
    eos = plain_text(target)[0, 9].item()
    minimum = {setting: 12 if setting == "min_new_tokens" else 19}
    assert_same_as_plain(target, drafter, rate, **inputs(), eos_token_id=eos, pad_token_id=95, **minimum)


@pytest.mark.parametrize("rate", RATES)
def test_stop_strings(target, drafter, tokenizer, rate):
    text = plain_text(target)[0, 7:].tolist()
    for offset in (0, 3, 4, 8, 9, 15):
        for width in (1, 2, 3):
            kwargs = {"stop_strings": [tokenizer.decode(text[offset : offset + width])], "tokenizer": tokenizer}
            acceptance = assert_same_as_plain(target, drafter, rate, **inputs(), **kwargs)
            assert sum(acceptance.lengths) <= offset + width - 1


class LastToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class CountedCalls(StoppingCriteria):
    """Stops at its n-th call: only a criterion that is asked once per token stops where plain decoding does."""

    def __init__(self, limit):
        self.limit, self.seen = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.shape[1], len(scores)))
        return torch.full((input_ids.shape[0],), len(self.seen) >= self.limit)


class ScoreMargin(StoppingCriteria):
    def __init__(self, margin):
        self.margin = margin

    def __call__(self, input_ids, scores, **kwargs):
        first, second = scores[-1].topk(2).values.unbind(-1)
        return first - second < self.margin


@pytest.mark.parametrize("rate", RATES)
def test_stopping_criteria(target, drafter, rate):
    text = plain_text(target)[0, 7:].tolist()
    for token in set(text[:16]):
        criteria = StoppingCriteriaList([LastToken(token)])
        assert_same_as_plain(target, drafter, rate, **inputs(), stopping_criteria=criteria)
    with_scores = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 24, "do_sample": False}
    for make in (lambda: CountedCalls(11), lambda: ScoreMargin(0.2)):
        alone, beside = make(), make()
        plain = target.generate(**inputs(), **with_scores, stopping_criteria=StoppingCriteriaList([alone]))
        with oracle(torch.tensor(text), rate):
            out = target.generate(
                **inputs(), **with_scores, stopping_criteria=StoppingCriteriaList([beside]), assistant_model=drafter
            )
        assert torch.equal(plain.sequences, out.sequences) and len(plain.scores) == len(out.scores)
        assert getattr(alone, "seen", None) == getattr(beside, "seen", None)
        assert plain.sequences.shape[1] < 31, "the criterion never fired"


def test_max_time(target, drafter):
    out = target.generate(**inputs(), max_new_tokens=400, max_time=0.0, assistant_model=drafter, do_sample=False)
    assert torch.equal(out, target.generate(**inputs(), max_new_tokens=400, max_time=0.0, do_sample=False))


# Processors


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [5, 6]]},
        {"suppress_tokens": list(range(0, 40))},
        {"begin_suppress_tokens": list(range(0, 60))},
        {"sequence_bias": [[[11], 6.0], [[12, 13], -4.0]]},
        {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 17, "pad_token_id": 95},
        {"forced_eos_token_id": 17, "eos_token_id": 17, "pad_token_id": 95},
        {"renormalize_logits": True, "remove_invalid_values": True},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [i for i in range(VOCAB) if (i + len(ids)) % 3]},
        {"watermarking_config": WatermarkingConfig(bias=4.0)},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_processors(target, drafter, rate, setting):
    assert_same_as_plain(target, drafter, rate, **inputs(), **setting)


def test_processors_act_on_drafts(target, drafter):
    seen = []
    choose = hf_domino.DominoCandidateGenerator.choose

    def spy(self, logits, *where):
        out = choose(self, logits, *where)
        seen.append(out[0].item())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_domino.DominoCandidateGenerator, "choose", spy)
        target.generate(
            **inputs(), max_new_tokens=20, do_sample=False, suppress_tokens=list(range(50)), assistant_model=drafter
        )
    assert len(seen) > 20 and min(seen) >= 50


class Counting(LogitsProcessor):
    """Adds a bias that depends on how often it was called: it must be called as in plain decoding."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.shape[1])
        return scores + torch.sin(torch.arange(scores.shape[-1]) * len(self.seen))


@pytest.mark.parametrize("rate", RATES)
def test_processors_that_count_their_calls(target, drafter, rate):
    alone, beside = Counting(), Counting()
    kwargs = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(**inputs(), **kwargs, logits_processor=LogitsProcessorList([alone]))
    with oracle(plain.sequences[0, 7:], rate), track_acceptance() as acceptance:
        out = target.generate(
            **inputs(), **kwargs, logits_processor=LogitsProcessorList([beside]), assistant_model=drafter
        )
    assert torch.equal(plain.sequences, out.sequences)
    assert alone.seen == beside.seen
    assert_alike(plain.scores, out.scores)
    assert acceptance.mean > 1


# What comes back


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("stop", (False, True), ids=("to the end", "stopped in a block"))
def test_returned_values(drafter, rate, stop):
    target = tiny_target(attn_implementation="eager")
    text = plain_text(target)[0, 7:]
    kwargs = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "repetition_penalty": 1.2,
        **{f"output_{name}": True for name in ("scores", "logits", "attentions", "hidden_states")},
    }
    if stop:
        kwargs["stopping_criteria"] = StoppingCriteriaList([CountedCalls(14)])
    plain = target.generate(**inputs(), **kwargs)
    if stop:
        kwargs["stopping_criteria"] = StoppingCriteriaList([CountedCalls(14)])
    with oracle(plain.sequences[0, 7:], rate):
        out = target.generate(**inputs(), **kwargs, assistant_model=drafter)
    assert len(text) and type(out) is type(plain) and torch.equal(plain.sequences, out.sequences)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert_alike(plain[name], out[name])
    assert plain[CACHE].get_seq_length() == out[CACHE].get_seq_length()
    for ours, theirs in zip(out[CACHE].layers, plain[CACHE].layers):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)


def assert_alike(plain, ours):
    assert type(plain) is type(ours) and len(plain) == len(ours)
    for a, b in zip(plain, ours):
        if isinstance(a, tuple):
            assert_alike(a, b)
        else:
            torch.testing.assert_close(b, a, atol=1e-3, rtol=1e-3)


def test_returned_values_of_sliding_layers():
    target = tiny_target(attn_implementation="eager", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    kwargs = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(**inputs(), **kwargs)
    with oracle(plain.sequences[0, 7:], 0.8):
        out = target.generate(**inputs(), **kwargs, assistant_model=tiny_drafter(target))
    assert_alike(plain.attentions, out.attentions)
    for ours, theirs in zip(out[CACHE].layers, plain[CACHE].layers):
        assert ours.keys.shape == theirs.keys.shape and not getattr(ours, "record_past", False)


def test_only_what_was_asked_for_comes_back(target, drafter):
    out = target.generate(**inputs(), max_new_tokens=5, return_dict_in_generate=True, assistant_model=drafter)
    assert out.scores is None and out.hidden_states is None and out.attentions is None and out.logits is None


def test_only_chosen_hidden_states_are_captured(target, drafter, monkeypatch):
    captured = []
    forward = type(target).forward

    @functools.wraps(forward)
    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        captured.append([place for place, state in enumerate(out.hidden_states) if state is not None])
        return out

    monkeypatch.setattr(type(target), "forward", spy)
    target.generate(**inputs(), max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert captured and all(places == [1, 3] or places == [0, 2] for places in captured)


# Streaming


@pytest.mark.parametrize("rate", RATES)
def test_streamers_get_the_same_calls(target, drafter, rate):
    text = plain_text(target)[0, 7:].tolist()
    for stop in ({}, {"eos_token_id": text[12], "pad_token_id": 95}):
        kwargs = {"max_new_tokens": 24, "do_sample": False, **stop}
        plain, assisted = Recorder(), Recorder()
        target.generate(**inputs(), **kwargs, streamer=plain)
        with oracle(torch.tensor(text), rate):
            target.generate(**inputs(), **kwargs, streamer=assisted, assistant_model=drafter)
        assert assisted.calls == plain.calls and assisted.calls.count("end") == 1


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= 12:
            raise RuntimeError("broken processor")
        return scores


def test_stream_ends_after_an_exception(target, drafter):
    streamer = Recorder()
    with pytest.raises(RuntimeError, match="broken processor"):
        target.generate(
            **inputs(),
            max_new_tokens=24,
            streamer=streamer,
            logits_processor=LogitsProcessorList([Failing()]),
            assistant_model=drafter,
        )
    assert streamer.calls[-1] == "end" and streamer.calls.count("end") == 1


def test_stream_ends_after_a_refusal(target, drafter):
    streamer = Recorder()
    with pytest.raises(ValueError, match="guidance_scale"):
        target.generate(**inputs(), guidance_scale=2.0, streamer=streamer, assistant_model=drafter)
    assert streamer.calls == ["end"]


# Prompts and caches


@pytest.mark.parametrize("rate", RATES)
def test_left_padding(target, drafter, rate):
    ids = torch.cat([torch.full((1, 5), 95), prompt_ids()], dim=1)
    mask = (torch.arange(12) >= 5).long()[None]
    assert_same_as_plain(target, drafter, rate, input_ids=ids, attention_mask=mask, pad_token_id=95)


def test_padding_does_not_change_the_drafts(target, drafter):
    ids, padding = prompt_ids(), torch.full((1, 5), 95)
    padded = {"input_ids": torch.cat([padding, ids], dim=1), "attention_mask": (torch.arange(12) >= 5).long()[None]}
    rounds = drafted_rounds(target, drafter, pad_token_id=95)
    for (_, tokens, logits), (_, same, close) in zip(
        rounds, drafted_rounds(target, drafter, pad_token_id=95, **padded)
    ):
        assert torch.equal(tokens, same)
        torch.testing.assert_close(logits, close, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rate", RATES)
def test_embedded_prompt(target, drafter, rate):
    ids = prompt_ids()
    for mask in (torch.ones_like(ids), (torch.arange(7) >= 2).long()[None]):
        embeds = target.get_input_embeddings()(ids).detach()
        kwargs = {"inputs_embeds": embeds, "attention_mask": mask, "pad_token_id": 95}
        assert_same_as_plain(target, drafter, rate, **kwargs)
        assert_same_as_plain(target, drafter, rate, **kwargs, input_ids=ids)


@pytest.mark.parametrize("rate", RATES)
def test_short_and_odd_prompts(target, drafter, rate):
    for prompt in ([[5]], [[MASK, 95, 94, MASK, MASK]], [[94]]):
        ids = torch.tensor(prompt)
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "eos_token_id": 94, "pad_token_id": 95}
        assert_same_as_plain(target, drafter, rate, **kwargs)


def test_no_prompt_but_bos(target, drafter):
    kwargs = {"bos_token_id": 3, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 95}
    plain = target.generate(**kwargs)
    with oracle(plain[0, 1:], 0.8):
        assert torch.equal(plain, target.generate(**kwargs, assistant_model=drafter))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("whole_prompt", (True, False), ids=("all ids", "new ids only"))
@pytest.mark.parametrize("padding", (0, 3))
def test_cache_of_an_earlier_turn(target, drafter, rate, whole_prompt, padding):
    ids = torch.cat([torch.full((1, padding), 95), prompt_ids()], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    kwargs = {"do_sample": False, "pad_token_id": 95, "return_dict_in_generate": True}

    def two_turns(first, second, continuation=None, **assistant):
        turn = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, **first, **kwargs)
        longer = torch.cat([turn.sequences, torch.tensor([[5, 6, 7]])], dim=1)
        longer_mask = torch.cat([mask, torch.ones(1, 9, dtype=torch.long)], dim=1)
        known = turn[CACHE].get_seq_length()
        given = longer if whole_prompt else longer[:, known:]
        more = {"input_ids": given, "attention_mask": longer_mask, "max_new_tokens": 12, CACHE: turn[CACHE]}
        fresh = target.generate(input_ids=longer, attention_mask=longer_mask, max_new_tokens=12, **kwargs)
        with oracle(fresh.sequences[0, longer.shape[1] :], rate):
            out = target.generate(**more, **second, **kwargs)
        assert torch.equal(out.sequences[:, given.shape[1] :], fresh.sequences[:, longer.shape[1] :])
        assert out[CACHE].get_seq_length() == longer.shape[1] + 12 - 1

    assisted = {"assistant_model": drafter}
    two_turns({}, assisted)
    two_turns(assisted, assisted)
    two_turns(assisted, {})


def test_the_next_turn_goes_on_with_the_drafters_context(target, drafter):
    lengths = []
    backbone = hf_domino.DominoCandidateGenerator.backbone

    def spy(self, embeddings):
        hidden = backbone(self, embeddings)
        lengths.append((self.context.length, hidden))
        return hidden

    kwargs = {"do_sample": False, "pad_token_id": 95, "return_dict_in_generate": True, "assistant_model": drafter}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_domino.DominoCandidateGenerator, "backbone", spy)
        turn = target.generate(**inputs(), max_new_tokens=6, **kwargs)
        longer = torch.cat([turn.sequences, torch.tensor([[5, 6, 7]])], dim=1)
        more = {"input_ids": longer, "attention_mask": torch.ones_like(longer), "max_new_tokens": 6}
        lengths.clear()
        target.generate(**more, **kwargs, **{CACHE: turn[CACHE]})
        continued = list(lengths)
        lengths.clear()
        target.generate(**more, **kwargs)
    assert [length for length, _ in continued] == [length for length, _ in lengths]
    for (_, hidden), (_, fresh) in zip(continued, lengths):
        torch.testing.assert_close(hidden, fresh, atol=1e-4, rtol=1e-4)


def test_a_returned_cache_can_be_copied_and_saved(target, drafter):
    kwargs = {"do_sample": False, "pad_token_id": 95, "return_dict_in_generate": True, "assistant_model": drafter}
    turn = target.generate(**inputs(), max_new_tokens=6, **kwargs)
    longer = torch.cat([turn.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    more = {"input_ids": longer, "attention_mask": torch.ones_like(longer), "max_new_tokens": 12}
    fresh = target.generate(**more, do_sample=False, pad_token_id=95)
    for cache in (copy.deepcopy(turn[CACHE]), pickle.loads(pickle.dumps(turn[CACHE])), turn[CACHE]):
        with oracle(fresh[0, longer.shape[1] :], 0.8), track_acceptance() as acceptance:
            out = target.generate(**more, **kwargs, **{CACHE: cache})
        assert torch.equal(out.sequences, fresh) and acceptance.mean > 1
    assert b"KeptContext" not in pickle.dumps(turn[CACHE])


@pytest.mark.parametrize(
    "first, second", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
def test_turns_in_and_out_of_inference_mode(target, drafter, first, second):
    kwargs = {"do_sample": False, "pad_token_id": 95, "return_dict_in_generate": True, "assistant_model": drafter}
    with first():
        turn = target.generate(**inputs(), max_new_tokens=6, **kwargs)
    longer = torch.cat([turn.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    more = {"input_ids": longer, "attention_mask": torch.ones_like(longer), "max_new_tokens": 12}
    fresh = target.generate(**more, do_sample=False, pad_token_id=95)
    with second():
        out = target.generate(**more, **kwargs, **{CACHE: turn[CACHE]})
    assert torch.equal(out.sequences, fresh)


def test_autocast(target, drafter):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = target.generate(**inputs(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert out.shape == (1, 19)


@pytest.mark.parametrize("rate", RATES)
def test_chunked_prefill(target, drafter, rate):
    for sliding in ({}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}):
        model = tiny_target(**sliding) if sliding else target
        for kwargs in (inputs(33), inputs(32)):
            assert_same_as_plain(model, drafter, rate, **kwargs, prefill_chunk_size=8)


def test_chunked_prefill_reads_in_chunks(target, drafter, monkeypatch):
    read = []
    forward = type(target).forward

    @functools.wraps(forward)
    def spy(self, *args, **kwargs):
        read.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", spy)
    target.generate(**inputs(20), max_new_tokens=1, prefill_chunk_size=8, assistant_model=drafter)
    assert read == [8, 8, 4]


@pytest.mark.skipif(not HAS_STATIC_CACHE, reason="transformers refuses static caches in assisted decoding before 5.24")
@pytest.mark.parametrize("rate", RATES)
def test_static_cache(target, drafter, rate):
    for new in (3, 9, 24):
        assert_same_as_plain(target, drafter, rate, new, **inputs(), cache_implementation="static")
    plain = plain_text(target)
    cache = StaticCache(config=target.config, max_cache_len=7 + 24)
    with oracle(plain[0, 7:], rate):
        assert torch.equal(plain, plain_text(target, assistant_model=drafter, **{CACHE: cache}))


@pytest.mark.parametrize("rate", RATES)
def test_own_empty_cache(target, drafter, rate):
    plain, cache = plain_text(target), DynamicCache(config=target.config)
    with oracle(plain[0, 7:], rate):
        assert torch.equal(plain, plain_text(target, assistant_model=drafter, **{CACHE: cache}))
    assert cache.get_seq_length() == 7 + 24 - 1


# Many calls


def test_one_drafter_serves_many_calls(target, drafter):
    before = copy.deepcopy(target.generation_config.to_dict())
    for length, setting in ((7, {}), (1, {"repetition_penalty": 1.4}), (20, {"num_assistant_tokens": 3}), (7, {})):
        assert_same_as_plain(target, drafter, 0.8, **inputs(length), **setting)
    assert target.generation_config.to_dict() == before
    assert target.generate.__func__ is type(target).generate and not vars(target).get("forward")


def test_threads(target, drafter):
    plain = [target.generate(**inputs(5 + i, seed=i), max_new_tokens=20, do_sample=False) for i in range(4)]
    results = [None] * 4

    def work(i):
        with track_acceptance() as acceptance:
            out = target.generate(**inputs(5 + i, seed=i), max_new_tokens=20, do_sample=False, assistant_model=drafter)
        results[i] = (out, sum(acceptance.lengths))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, (out, kept) in zip(plain, results):
        assert torch.equal(expected, out) and kept == 19


@pytest.mark.parametrize("num_assistant_tokens", (1, 2, 5, 8))
def test_num_assistant_tokens_shortens_the_block(target, drafter, num_assistant_tokens):
    acceptance = assert_same_as_plain(target, drafter, 1.0, 30, **inputs(), num_assistant_tokens=num_assistant_tokens)
    assert max(acceptance.drafted) == num_assistant_tokens and max(acceptance.lengths) == num_assistant_tokens + 1


@pytest.mark.parametrize("head", ("domino", "none"))
@pytest.mark.parametrize("sample_from_anchor", (True, False))
@pytest.mark.parametrize("num_uncorrected_tokens", (0, 1, 2))
def test_both_alignments_and_heads(target, head, sample_from_anchor, num_uncorrected_tokens):
    drafter = tiny_drafter(
        target, head=head, sample_from_anchor=sample_from_anchor, num_uncorrected_tokens=num_uncorrected_tokens
    )
    acceptance = assert_same_as_plain(target, drafter, 1.0, 30, **inputs())
    assert max(acceptance.drafted) == (8 if sample_from_anchor else 7)


def test_pipeline(target, drafter, tokenizer):
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        assert getattr(target.config, name) == getattr(drafter.config, name)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    text = "Why?"
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **kwargs)
    with track_acceptance() as acceptance:
        assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)(
            text, **kwargs
        )
    assert plain == assisted and acceptance.lengths


def test_pipeline_compares_special_ids_itself(target, tokenizer):
    """transformers takes another eos for another tokenizer and says so; the ids come from the target's config."""
    drafter = tiny_drafter(target, eos_token_id=3)
    with pytest.raises(ValueError, match="different tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)


# Refusals


@pytest.mark.parametrize(
    "setting, named",
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"num_assistant_tokens": 9}, "from 1 to 8.*is 9"),
        ({"num_assistant_tokens": 0}, "from 1 to 8.*is 0"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "(?i)contrastive"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "contrastive_search"),
        ({"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": None}, "batch of 2"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_by_name_before_the_prefill(target, drafter, monkeypatch, setting, named):
    @functools.wraps(type(target).forward)
    def forward(*args, **kwargs):
        raise AssertionError("the target has worked already")

    monkeypatch.setattr(type(target), "forward", forward)
    with pytest.raises(ValueError, match=named):
        target.generate(**{**inputs(), "max_new_tokens": 4, **setting}, assistant_model=drafter)


def test_a_drafter_for_another_target_is_refused(target):
    other = tiny_target(hidden_size=48, vocab_size=80, num_hidden_layers=6)
    drafter = tiny_drafter(other, mask_token_id=79, target_layer_ids=[0, 5])
    with pytest.raises(ValueError) as error:
        target.generate(**inputs(), assistant_model=drafter)
    for part in ("target_hidden_size is 48", "hidden_size is 32", "vocab_size is 80", "is 97", "[0, 5]", "0 to 3"):
        assert part in str(error.value)


def test_the_targets_eos_is_no_mask(target, drafter):
    with_eos = tiny_target()
    with_eos.generation_config.eos_token_id = [5, MASK]
    with pytest.raises(ValueError, match=rf"mask_token_id is {MASK}, the target's eos_token_id is \[5, {MASK}\]"):
        with_eos.generate(**inputs(), assistant_model=drafter)


# Connecting


def test_connecting_again_changes_nothing_and_can_be_undone(target, drafter):
    connected = GenerationMixin._assisted_decoding
    hf_domino.connect()
    assert GenerationMixin._assisted_decoding is connected
    try:
        hf_domino.disconnect()
        assert not hasattr(GenerationMixin._assisted_decoding, "hf_domino_original")
        assert not hasattr(GenerationMixin._validate_generation_mode, "hf_domino_original")
        assert connected.hf_domino_original is GenerationMixin._assisted_decoding
        hf_domino.disconnect()
    finally:
        hf_domino.connect()
    assert_same_as_plain(target, drafter, **inputs())


def test_other_assistants_pass_untouched(target):
    small = tiny_target(num_hidden_layers=1)
    kwargs = {**inputs(), "max_new_tokens": 12, "do_sample": False}
    with track_acceptance() as acceptance:
        assisted = target.generate(**kwargs, assistant_model=small)
        lookup = target.generate(**kwargs, prompt_lookup_num_tokens=3)
    assert torch.equal(assisted, target.generate(**kwargs)) and torch.equal(lookup, assisted)
    assert acceptance.lengths == []


def test_a_target_that_prefers_dflash_still_takes_a_domino_drafter(target, drafter):
    assert_same_as_plain(target, drafter, **inputs(), speculation_type="dflash")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda patch: patch.setattr(assisted_generation.transformers, "__version__", "6.1.0"),
            "outside the supported range",
        ),
        (
            lambda patch: patch.setattr(assisted_generation.transformers, "__version__", "5.16.2"),
            "outside the supported range",
        ),
        (lambda patch: patch.delattr(GenerationMixin, "_prefill"), "_prefill has no"),
        (
            lambda patch: patch.setattr(GenerationMixin, "_assisted_decoding", lambda self, input_ids: input_ids),
            "does not use .*crop",
        ),
    ],
    ids=("too new", "too old", "a method is gone", "another loop"),
)
def test_an_unknown_generate_is_an_import_error(change, message):
    hf_domino.disconnect()
    try:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            with pytest.raises(ImportError, match=message):
                hf_domino.connect()
            assert not hasattr(GenerationMixin._validate_generation_mode, "hf_domino_original")
    finally:
        hf_domino.connect()


def test_generation_config_object(target, drafter):
    config = GenerationConfig(max_new_tokens=20, do_sample=False, num_assistant_tokens=4, pad_token_id=95)
    plain = target.generate(**inputs(), generation_config=config)
    with oracle(plain[0, 7:], 1.0), track_acceptance() as acceptance:
        out = target.generate(**inputs(), generation_config=config, assistant_model=drafter)
    assert torch.equal(plain, out) and max(acceptance.lengths) == 5
    assert config.return_dict_in_generate in (None, False) and config.max_new_tokens == 20


def test_no_time_is_lost_after_max_time(target, drafter):
    start = time.monotonic()
    target.generate(**inputs(), max_new_tokens=400, max_time=0.05, assistant_model=drafter, do_sample=False)
    assert time.monotonic() - start < 5
