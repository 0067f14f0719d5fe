"""What a training step costs: peak memory at a large vocabulary, and sequences a second at SmolLM2-135M's sizes.

python benchmarks/training_cost.py memory
python benchmarks/training_cost.py speed
"""

import resource
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoConfig, DominoDrafter
from hf_domino.target import Target
from hf_domino.training.objective import DraftingObjective, draw_anchors

LARGE = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, head_dim=128)
SMALL = dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, head_dim=64)


def make_pair(sizes, num_key_value_heads, **drafter_fields):
    """A target of one layer (only its embeddings and head are asked) in bfloat16, and a drafter in float32."""
    config = Qwen3Config(**sizes, num_hidden_layers=1, num_key_value_heads=num_key_value_heads)
    target = Qwen3ForCausalLM(config).bfloat16().requires_grad_(False).eval()
    target.config.num_hidden_layers = 30
    return Target(target), DominoDrafter(DominoConfig.for_target(target.config, **drafter_fields))


def make_batch(drafter, batch_size, length, num_anchors):
    vocab, width = drafter.config.vocab_size, drafter.fc.in_features
    mask = torch.ones(batch_size, length)
    return {
        "input_ids": torch.randint(0, vocab - 1, (batch_size, length)),
        "loss_mask": mask,
        "features": torch.randn(batch_size, length, width, dtype=torch.bfloat16),
        "last_hidden": torch.randn(batch_size, length, drafter.config.hidden_size, dtype=torch.bfloat16),
        "anchors": draw_anchors(mask, torch.arange(batch_size), num_anchors, seed=0, epoch=0),
    }


def peak_memory(autocast=False, length=1024, num_anchors=256, **options):
    """GB of one forward and backward pass at vocabulary 151,936 and block 16, weights included, in a fresh process."""
    target, drafter = make_pair(LARGE, 8, num_hidden_layers=5, block_size=16)
    objective = DraftingObjective(drafter, target, **options)
    batch = make_batch(drafter, 1, length, num_anchors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.time()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, sums = objective(**batch, base_weight=0.5)
    loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{int(sums['rows'])} drafts: {after:.2f} GB at most, {before:.2f} GB before; {time.time() - start:.0f} s")


def speed(autocast, loss_vocabulary_size, soft_target_weight=0.0, batch_size=4, steps=3):
    """Sequences a second: 3 layers, block 8, 64 anchors on each sequence of 300 tokens, features given."""
    target, drafter = make_pair(SMALL, 3, num_hidden_layers=3, block_size=8, causal_state_size=256, correction_rank=128)
    vocabulary = torch.arange(loss_vocabulary_size) if loss_vocabulary_size else None
    objective = DraftingObjective(
        drafter, target, loss_vocabulary=vocabulary, soft_target_weight=soft_target_weight
    ).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), 6e-4, weight_decay=0.0, fused=True)
    batch = make_batch(drafter, batch_size, 300, 64)
    batch["input_ids"] %= loss_vocabulary_size or 2**30
    for step in range(steps + 1):
        if step == 1:
            start, cpu = time.time(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = objective(**batch, base_weight=0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rate = steps * batch_size / (time.time() - start)
    cpu = (time.process_time() - cpu) / steps / batch_size
    print(
        f"{'bfloat16' if autocast else 'float32'}, {loss_vocabulary_size or 'all'} tokens, soft targets "
        f"{soft_target_weight}: {rate:.2f} sequences/s, {torch.get_num_threads()} threads, {cpu:.2f} CPU seconds each",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        peak_memory()
    else:
        for arguments in ((False, 4096), (True, 4096), (True, 4096, 0.7), (True, None), (True, None, 0.7)):
            speed(*arguments)
