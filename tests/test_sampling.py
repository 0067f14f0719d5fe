"""Sampling with a drafter draws from the target's distribution: measured against exact enumeration."""

import itertools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_domino import DominoCandidateGenerator, track_acceptance

from .tiny import tiny_drafter, tiny_target

VOCAB, MASK, LENGTH, DRAWS = 6, 5, 3, 600
PROMPT = torch.tensor([[1, 2, 3, 4]])
SETTINGS = {
    "plain": {"top_k": 0},
    "top-k": {"top_k": 3},
    "top-p, temperature and penalty": {"top_k": 0, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.3},
}


def sampling_target():
    # Narrow weights: every token has a chance.
    return tiny_target(vocab_size=VOCAB, initializer_range=0.15, num_hidden_layers=2, num_attention_heads=2)


def sampling_drafter(target, **overrides):
    """Its distribution is near the target's but not the same: drafts are accepted often, and often not."""
    fields = {"block_size": 4, "num_hidden_layers": 1, "target_layer_ids": [0], **overrides}
    drafter = tiny_drafter(target, mask_token_id=MASK, **fields)
    with torch.no_grad():
        drafter.embed_proj[2].weight.mul_(0.5)
    return drafter


@pytest.fixture(scope="module")
def target():
    return sampling_target()


@pytest.fixture(scope="module")
def drafter(target):
    return sampling_drafter(target)


class Tilt(LogitsProcessor):
    """A processor of the user's own: handled one emitted token at a time."""

    def __call__(self, input_ids, scores):
        return scores + torch.linspace(0, 1.5, scores.shape[-1]) * (input_ids.shape[1] % 2)


def kwargs_of(setting, own_processor=False):
    processors = LogitsProcessorList([Tilt()]) if own_processor else None
    return {
        "input_ids": PROMPT,
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": LENGTH,
        "do_sample": True,
        "logits_processor": processors,
        "pad_token_id": MASK,
        "eos_token_id": None,
        **setting,
    }


@torch.no_grad()
def exact_distribution(target, kwargs):
    """Probability of every continuation of LENGTH tokens, from the target's logits and the call's own processors."""
    config, _ = target._prepare_generation_config(
        None, **{k: v for k, v in kwargs.items() if k in ("top_k", "top_p", "temperature", "repetition_penalty")}
    )
    config.do_sample = True
    processors = target._get_logits_processor(config, PROMPT.shape[1], PROMPT, None, kwargs["logits_processor"] or [])
    probabilities = {}
    prefixes = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for prefix, probability in prefixes.items():
            ids = torch.cat([PROMPT, torch.tensor([prefix], dtype=torch.long)], dim=1)
            row = processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
            for token in range(VOCAB):
                longer[(*prefix, token)] = probability * row[token].item()
        prefixes = longer
    for continuation in itertools.product(range(VOCAB), repeat=LENGTH):
        probabilities[continuation] = prefixes[continuation]
    return probabilities


def total_variation(counts, exact):
    total = sum(counts.values())
    return 0.5 * sum(abs(counts.get(key, 0) / total - probability) for key, probability in exact.items())


def sampling_noise(exact, draws, repeats=40):
    """Total variation that `draws` draws from `exact` itself show: mean and standard deviation."""
    keys, weights = list(exact), torch.tensor(list(exact.values()))
    generator = torch.Generator().manual_seed(0)
    distances = []
    for _ in range(repeats):
        drawn = torch.multinomial(weights, draws, replacement=True, generator=generator)
        counts = dict(zip(keys, torch.bincount(drawn, minlength=len(keys)).tolist()))
        distances.append(total_variation(counts, exact))
    distances = torch.tensor(distances)
    return distances.mean().item(), distances.std().item()


def draw(target, drafter, kwargs, draws=DRAWS):
    counts = {}
    for seed in range(draws):
        torch.manual_seed(seed)
        out = target.generate(**kwargs, assistant_model=drafter)
        key = tuple(out[0, PROMPT.shape[1] :].tolist())
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize(
    "name, own_processor", [*((name, False) for name in SETTINGS), ("plain", True)], ids=lambda value: str(value)
)
def test_the_targets_distribution(target, drafter, name, own_processor):
    kwargs = kwargs_of(SETTINGS[name], own_processor)
    exact = exact_distribution(target, kwargs)
    with track_acceptance() as acceptance:
        counts = draw(target, drafter, kwargs)
    assert 1.05 < acceptance.mean < max(acceptance.drafted) + 1, "drafts must be accepted and rejected"
    assert all(exact[key] > 0 for key in counts), "a token outside the support came out"
    mean, deviation = sampling_noise(exact, DRAWS)
    assert total_variation(counts, exact) < mean + 4 * deviation


def test_the_test_sees_a_wrong_distribution(target, drafter, monkeypatch):
    """Drafts from one distribution, verified as if they came from another: the measure must notice."""
    draft = DominoCandidateGenerator.draft

    def dishonest(self, input_ids, count):
        tokens, logits = draft(self, input_ids, count)
        return tokens, -5 * logits

    monkeypatch.setattr(DominoCandidateGenerator, "draft", dishonest)
    kwargs = kwargs_of(SETTINGS["plain"])
    exact = exact_distribution(target, kwargs)
    mean, deviation = sampling_noise(exact, DRAWS)
    assert total_variation(draw(target, drafter, kwargs), exact) > mean + 8 * deviation


@pytest.mark.parametrize("setting", ({"top_k": 1}, {"top_k": 0, "temperature": 1e-6}), ids=("top-k 1", "cold"))
def test_sampling_without_choice_is_greedy(target, drafter, setting):
    kwargs = {**kwargs_of(setting), "max_new_tokens": 20}
    greedy = target.generate(**{**kwargs, "do_sample": False, "top_k": None, "temperature": None})
    for seed in range(4):
        torch.manual_seed(seed)
        assert torch.equal(greedy, target.generate(**kwargs, assistant_model=drafter))


@torch.no_grad()
def test_verification_gets_the_distribution_that_drafts_came_from(target, drafter, monkeypatch):
    """Processors act on drafts too: no draft outside top-k, and the logits handed over say so (B28)."""
    seen, get_candidates = [], DominoCandidateGenerator.get_candidates

    def spy(self, *args, **kwargs):
        seen.append(get_candidates(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(DominoCandidateGenerator, "get_candidates", spy)
    target.generate(**{**kwargs_of({"top_k": 2}), "max_new_tokens": 20}, assistant_model=drafter)
    handed = [(ids, logits) for ids, logits in seen if logits is not None]
    assert handed
    for ids, logits in handed:
        drafts = ids[0, -logits.shape[1] :]
        probabilities = logits[0].softmax(-1)
        assert logits.dtype == torch.float32 and ((probabilities > 0).sum(-1) <= 2).all()
        assert (probabilities[range(len(drafts)), drafts] > 0).all()
