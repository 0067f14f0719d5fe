"""Tiny random targets and drafters, and the comparison with plain decoding."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoConfig, DominoDrafter, Eagle3Config, Eagle3Drafter, track_acceptance
from hf_domino.evaluation.oracle import GENERATORS, oracle

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


def tiny_eagle3(target, **overrides):
    """A random EAGLE-3 drafter for a target, whose drafts depend on everything it reads."""
    torch.manual_seed(1)
    fields = {"target_layer_ids": [2, 0, 1], "initializer_range": 0.3, **overrides}
    drafter = Eagle3Drafter(Eagle3Config.for_target(target.config, **fields)).eval()
    for norm in (module for module in drafter.modules() if "Norm" in type(module).__name__):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    if drafter.d2t is not None:
        vocabulary = torch.randperm(drafter.config.vocab_size)[: len(drafter.d2t)].sort().values
        drafter.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        drafter.t2d.zero_()[vocabulary] = True
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


def forbid_host_synchronisation(monkeypatch, kind, name):
    """Nothing waits for the device inside this method: there no tensor becomes a Python number."""
    inside, method = [], getattr(kind, name)

    def guarded(self, *args):
        inside.append(True)
        try:
            return method(self, *args)
        finally:
            inside.pop()

    def forbid(name):
        convert = getattr(torch.Tensor, name)

        def call(self, *args):
            assert not inside, f"Tensor.{name} waits for the device"
            return convert(self, *args)

        monkeypatch.setattr(torch.Tensor, name, call)

    monkeypatch.setattr(kind, name, guarded)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        forbid(name)


def assert_same_as_plain(target, drafter, rate=0.8, max_new_tokens=24, **kwargs):
    """Greedy generate() with a drafter gives the tokens of generate() without it; returns the acceptance."""
    kwargs = {"do_sample": False, "max_new_tokens": max_new_tokens, **kwargs}
    plain = target.generate(**kwargs)
    prompt_length = kwargs["input_ids"].shape[1] if kwargs.get("input_ids") is not None else 0
    with oracle(plain[0, prompt_length:], rate), track_acceptance() as acceptance:
        assisted = target.generate(**kwargs, assistant_model=drafter)
    assert torch.equal(plain, assisted), (plain.tolist(), assisted.tolist())
    return acceptance


def drafted_rounds(target, drafter, truth=None, **kwargs):
    """[(input_ids, tokens [1, n], logits they were chosen from [1, n, V])] of every round of a generate() call.

    With the call's `truth`, most of the drafts are replaced by it once they are recorded, so that they are accepted.
    """
    rounds = []

    def recording(draft):
        def recorded(self, input_ids, count):
            self.returns_logits, returns_logits = True, self.returns_logits
            rounds.append((input_ids, *draft(self, input_ids, count)))
            self.returns_logits = returns_logits
            return rounds[-1][1:]

        return recorded

    with ExitStack() as patches:
        for kind in GENERATORS:
            patches.enter_context(mock.patch.object(kind, "draft", recording(kind.draft)))
        kwargs = {**inputs(), "do_sample": False, "max_new_tokens": 20, **kwargs}
        if truth is not None:
            patches.enter_context(oracle(truth, 0.7))
        target.generate(**kwargs, assistant_model=drafter)
    return rounds
