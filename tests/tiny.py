"""Tiny random targets and drafters, and the comparison with plain decoding."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoCandidateGenerator, DominoConfig, DominoDrafter, track_acceptance
from hf_domino.evaluation.oracle import oracle

VOCAB, MASK = 97, 96
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    # Wide enough for greedy text to be varied.
    initializer_range=0.6,
    tie_word_embeddings=False,
)
DRAFTER = dict(num_hidden_layers=2, block_size=8, target_layer_ids=[0, 2], causal_state_size=16, correction_rank=8)


def tiny_target(**overrides):
    """A Qwen3 whose greedy text is varied, in float32."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **overrides})).eval()


def tiny_drafter(target, **overrides):
    """A random drafter for a target, with a correction that is not zero."""
    torch.manual_seed(1)
    fields = {"mask_token_id": MASK, **DRAFTER, **overrides}
    drafter = DominoDrafter(DominoConfig.for_target(target.config, **fields)).eval()
    if drafter.config.head == "domino":
        torch.nn.init.normal_(drafter.embed_proj[2].weight)
    return drafter


def prompt_ids(length=7, seed=0, high=90):
    return torch.randint(1, high, (1, length), generator=torch.Generator().manual_seed(seed))


def inputs(length=7, seed=0):
    ids = prompt_ids(length, seed)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@contextmanager
def no_forward():
    """Not one module of any model runs inside."""
    called = []
    hook = register_module_forward_pre_hook(lambda module, _: called.append(type(module).__name__))
    try:
        yield
    finally:
        hook.remove()
    assert not called


def assert_same_as_plain(target, drafter, rate=0.8, max_new_tokens=24, **kwargs):
    """Greedy generate() with a drafter gives the tokens of generate() without it; returns the acceptance."""
    kwargs = {"do_sample": False, "max_new_tokens": max_new_tokens, **kwargs}
    plain = target.generate(**kwargs)
    prompt_length = kwargs["input_ids"].shape[1] if kwargs.get("input_ids") is not None else 0
    with oracle(plain[0, prompt_length:], rate), track_acceptance() as acceptance:
        assisted = target.generate(**kwargs, assistant_model=drafter)
    assert torch.equal(plain, assisted), (plain.tolist(), assisted.tolist())
    return acceptance


def drafted_rounds(target, drafter, **kwargs):
    """[(input_ids, tokens [1, n], logits they were chosen from [1, n, V])] of every round of a generate() call."""
    rounds, draft = [], DominoCandidateGenerator.draft

    def recorded(self, input_ids, count):
        self.returns_logits, returns_logits = True, self.returns_logits
        rounds.append((input_ids, *draft(self, input_ids, count)))
        self.returns_logits = returns_logits
        return rounds[-1][1:]

    with mock.patch.object(DominoCandidateGenerator, "draft", recorded):
        kwargs = {**inputs(), "do_sample": False, "max_new_tokens": 20, **kwargs}
        target.generate(**kwargs, assistant_model=drafter)
    return rounds
