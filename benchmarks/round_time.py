"""Where the time of an assisted round goes, and what plain and assisted decoding say, side by side.

    python benchmarks/round_time.py                        # SmolLM2-135M-Instruct, an oracle in the drafter's place
    python benchmarks/round_time.py --drafter FOLDER_OR_ID --target FOLDER_OR_ID

All ratios come from one run: plain and assisted calls alternate prompt by prompt, the target's own pass over as many
tokens is timed between them, and medians are over rounds.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_domino
from hf_domino import DominoCandidateGenerator, DominoConfig, DominoDrafter, track_acceptance
from hf_domino.assisted_generation import Call
from hf_domino.demo_target import demo_target
from hf_domino.evaluation.oracle import oracle

PARTS = {
    "features": (DominoCandidateGenerator, "observe_pass"),
    "backbone": (DominoCandidateGenerator, "backbone"),
    "output head": (DominoCandidateGenerator, "base_logits"),
    "correction": (DominoCandidateGenerator, "correct"),
    "verify": (Call, "__call__"),
}


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def timed_parts(device):
    """Collects seconds for every call of each part of a round."""
    seconds, originals = defaultdict(list), {}

    def timed(name, method):
        def call(*args, **kwargs):
            start = now(device)
            result = method(*args, **kwargs)
            seconds[name].append(now(device) - start)
            return result

        return call

    for name, (owner, attribute) in PARTS.items():
        originals[name] = getattr(owner, attribute)
        setattr(owner, attribute, timed(name, originals[name]))
    try:
        yield seconds
    finally:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, originals[name])


@torch.no_grad()
def own_pass(target, context, num_tokens, repeats=7):
    """Median seconds of the target's own forward pass over `num_tokens` tokens behind a context of that many tokens."""
    device = target.device
    cache = DynamicCache(config=target.config)
    name = hf_domino.assisted_generation._CACHE
    target(torch.ones(1, context, dtype=torch.long, device=device), use_cache=True, **{name: cache})
    cache.activate_past_recording()
    ids, times = torch.ones(1, num_tokens, dtype=torch.long, device=device), []
    for _ in range(repeats + 1):
        start = now(device)
        target(ids, use_cache=True, **{name: cache})
        times.append(now(device) - start)
        cache.crop(-num_tokens)
    return statistics.median(times[1:])


def load(arguments):
    dtype = getattr(torch, arguments.dtype)
    folder = arguments.target or demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if arguments.drafter:
        drafter = DominoDrafter.from_pretrained(arguments.drafter, dtype=dtype)
    else:
        torch.manual_seed(0)
        shape = {"num_hidden_layers": 3, "block_size": arguments.block_size, "causal_state_size": 256}
        drafter = DominoDrafter(DominoConfig.for_target(target.config, tokenizer, **shape)).to(dtype)
    return target, tokenizer, drafter.to(arguments.device).eval()


def measure(arguments):
    target, tokenizer, drafter = load(arguments)
    prompts = [json.loads(line)["prompt"] for line in Path(arguments.prompts).read_text().splitlines()]
    kwargs = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    length = drafter.config.num_draft_tokens + 1
    parts, rounds, plain_seconds, assisted_seconds, passes, singles = defaultdict(list), [], [], [], [], []
    lengths, agreed, new_tokens = [], 0, 0
    for number, prompt in enumerate([prompts[0], *prompts[: arguments.num_prompts]]):
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = inputs.to(target.device)
        prompt_length = inputs["input_ids"].shape[1]
        start = now(target.device)
        plain = target.generate(**inputs, **kwargs)
        plain_time = now(target.device) - start
        context = prompt_length + (plain.shape[1] - prompt_length) // 2
        passes_now = own_pass(target, context, length), own_pass(target, context, 1)
        with_oracle = nullcontext() if arguments.drafter else oracle(plain[0, prompt_length:], arguments.oracle_rate)
        with with_oracle, track_acceptance() as acceptance, timed_parts(target.device) as seconds:
            start = now(target.device)
            assisted = target.generate(**inputs, **kwargs, assistant_model=drafter)
            assisted_time = now(target.device) - start
        if number == 0:  # warm-up
            continue
        prefill = seconds["verify"][0]
        for name, values in seconds.items():
            parts[name] += values[1:] if name in ("verify", "features", "backbone") else values
        rounds.append((assisted_time - prefill) / len(acceptance.lengths))
        plain_seconds.append(plain_time - prefill)
        assisted_seconds.append(assisted_time - prefill)
        passes.append(passes_now[0])
        singles.append(passes_now[1])
        lengths += acceptance.lengths
        same = min(plain.shape[1], assisted.shape[1])
        first = (plain[0, :same] != assisted[0, :same]).nonzero()
        first = first[0].item() - prompt_length if len(first) else None
        agreed += first is None and plain.shape == assisted.shape
        new_tokens += plain.shape[1] - prompt_length
        if number <= arguments.show:
            show(prompt, tokenizer, plain, assisted, prompt_length, acceptance, first)
    median = {name: statistics.median(values) for name, values in parts.items()}
    whole = statistics.median(rounds)
    own, single = statistics.median(passes), statistics.median(singles)
    draft = sum(median[name] for name in ("features", "backbone", "output head", "correction"))
    return {
        "target": str(arguments.target or "SmolLM2-135M-Instruct"),
        "drafter": arguments.drafter or f"random, oracle at {arguments.oracle_rate}",
        "dtype": arguments.dtype,
        "block_size": drafter.config.block_size,
        "tokens_verified": length,
        "prompts": len(rounds),
        "max_new_tokens": arguments.max_new_tokens,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {arguments.device}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "acceptance_length": sum(lengths) / len(lengths),
        "prompts_with_the_same_tokens": agreed,
        "ms": {
            **{name: 1e3 * value for name, value in median.items()},
            "rest": 1e3 * (whole - draft - median["verify"]),
            "round": 1e3 * whole,
            "own pass over the same tokens": 1e3 * own,
            "own pass over 1 token": 1e3 * single,
        },
        "ratios": {
            "round beyond the own pass, of that pass": (whole - own) / own,
            "drafting, of the own pass": draft / own,
            "correction, of drafting": median["correction"] / draft,
            "speedup of decoding": sum(plain_seconds) / sum(assisted_seconds),
        },
    }


def show(prompt, tokenizer, plain, assisted, prompt_length, acceptance, first):
    print(f"\n## {prompt}\n")
    for name, ids in (("plain", plain), ("assisted", assisted)):
        print(f"{name}: {tokenizer.decode(ids[0, prompt_length:])}\n")
    print(f"first difference: {'none' if first is None else f'new token {first}'}; rounds: {acceptance.lengths}")


def main():
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="folder or Hub id; default: random weights with an oracle")
    parser.add_argument("--prompts", default=here / "prompts.jsonl", help="JSON lines with a `prompt`")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=8, help="of the random drafter")
    parser.add_argument("--oracle-rate", type=float, default=0.75)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", type=int, default=1, help="prompts to print side by side")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    result = measure(arguments)
    print()
    for group in ("ms", "ratios"):
        for name, value in result[group].items():
            print(f"{name:42s} {value:8.2f}" + (" ms" if group == "ms" else ""))
    print(f"{'acceptance length':42s} {result['acceptance_length']:8.2f}")
    print(f"same tokens as plain: {result['prompts_with_the_same_tokens']} of {result['prompts']} prompts")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
