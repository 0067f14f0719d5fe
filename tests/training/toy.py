"""A toy language, next token = a fixed function of the last, and a target whose greedy text it is."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoConfig, DominoDrafter
from hf_domino.target import Target
from hf_domino.training.features import Conversations, collate, compute_features
from hf_domino.training.objective import DraftingObjective, base_loss_weight, draw_anchors, summarize

VOCAB, MASK = 24, 23
SUCCESSOR = torch.randperm(MASK - 1, generator=torch.Generator().manual_seed(3))
# One cycle through all tokens but the last two.
SUCCESSOR = torch.zeros(MASK - 1, dtype=torch.long).scatter(0, SUCCESSOR, SUCCESSOR.roll(-1))


def toy_target():
    """Its layers add nothing, so that its head maps a token's own embedding to the token's successor."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=VOCAB,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=12,
            tie_word_embeddings=False,
            max_position_embeddings=256,
        )
    ).eval()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        target.lm_head.weight.zero_()
        target.lm_head.weight[SUCCESSOR, torch.arange(MASK - 1)] = 3.0
    target.generation_config.eos_token_id = None
    return target


def toy_text(start, length):
    text = [start]
    while len(text) < length:
        text.append(int(SUCCESSOR[text[-1]]))
    return text


def toy_records(count=44, length=24, prompt=2):
    """Texts that start everywhere; the first `prompt` tokens are not supervised."""
    texts = [toy_text(i % (MASK - 1), length + i % 5) for i in range(count)]
    return [{"input_ids": text, "loss_mask": [0] * prompt + [1] * (len(text) - prompt)} for text in texts]


def toy_drafter(target, **overrides):
    torch.manual_seed(1)
    fields = dict(
        mask_token_id=MASK,
        num_hidden_layers=1,
        block_size=4,
        target_layer_ids=[1],
        causal_state_size=24,
        correction_rank=16,
        intermediate_size=64,
        initializer_range=0.2,
    )
    return DominoDrafter(DominoConfig.for_target(target.config, **{**fields, **overrides}))


def frozen(model):
    return Target(model.requires_grad_(False).eval())


def toy_training(drafter, target, steps, learning_rate=0.01, total_steps=None, **options):
    """A bare training loop on the toy language; returns the metrics of every step."""
    batch = collate(list(Conversations(toy_records())))
    features, last_hidden = compute_features(
        target, batch["input_ids"], batch["attention_mask"], drafter.config.target_layer_ids, last_hidden=True
    )
    objective = DraftingObjective(drafter, target, **options)
    optimizer = torch.optim.AdamW(drafter.parameters(), learning_rate, weight_decay=0.0)
    metrics = []
    for step in range(steps):
        anchors = draw_anchors(batch["loss_mask"], batch["record_ids"], 4, seed=0, epoch=step)
        loss, sums = objective(
            batch["input_ids"],
            batch["loss_mask"],
            anchors,
            features,
            base_loss_weight(step, total_steps or steps),
            last_hidden=last_hidden,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.append(summarize(sums))
    return metrics
