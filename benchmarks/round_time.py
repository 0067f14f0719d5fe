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
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoConfig, DominoDrafter, track_acceptance
from hf_domino.demo_target import demo_target
from hf_domino.evaluation.oracle import oracle
from hf_domino.evaluation.timing import DRAFTING_PARTS, now, own_pass, timed_parts, watch_passes


def load(arguments):
    """The target, its tokenizer, and the drafters to compare by name."""
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    folder = arguments.target or demo_target()
    if arguments.shape is None:
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        config = AutoConfig.for_model(**json.loads(Path(arguments.shape).read_text()))
        target = AutoModelForCausalLM.from_config(config, dtype=dtype)
        target.generation_config.eos_token_id = None
    target.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drafters = {}
    for block_size in arguments.block_sizes if arguments.drafter is None else [None]:
        for candidates, vocabulary in arguments.variants:
            reading = {"num_correction_candidates": candidates}
            if arguments.drafter is not None:
                drafter = DominoDrafter.from_pretrained(arguments.drafter, dtype=dtype, **reading)
            else:
                torch.manual_seed(0)
                shape = {"num_hidden_layers": 3, "block_size": block_size, "causal_state_size": 256}
                config = DominoConfig.for_target(target.config, tokenizer, **shape, **reading)
                drafter = DominoDrafter(config).to(dtype)
            if vocabulary is None:
                drafter.set_draft_vocabulary(None)
            elif vocabulary != drafter.config.draft_vocabulary_size:  # which tokens these are does not matter here
                drafter.set_draft_vocabulary(range(vocabulary))
            name = (
                f"block {drafter.config.block_size}, {candidates or 'all'} candidates of {vocabulary or 'all'} tokens"
            )
            drafters[name] = drafter.to(device).eval()
    return target, tokenizer, drafters


class Measured:
    """What the calls with one drafter showed."""

    def __init__(self):
        self.parts, self.lengths = defaultdict(list), []
        self.rounds, self.own, self.plain, self.assisted = [], [], [], []
        self.agreed = 0

    def summary(self):
        median = {name: statistics.median(values) for name, values in self.parts.items()}
        whole, own = statistics.median(self.rounds), statistics.median(self.own)
        draft = sum(median[name] for name in DRAFTING_PARTS)
        return {
            "acceptance_length": sum(self.lengths) / len(self.lengths),
            "prompts_with_the_same_tokens": self.agreed,
            "ms": {
                **{name: 1e3 * median[name] for name in (*DRAFTING_PARTS, "verify")},
                "rest": 1e3 * (whole - draft - median["verify"]),
                "round": 1e3 * whole,
                "own pass over the same tokens": 1e3 * own,
            },
            "ratios": {
                "round beyond the own pass, of that pass": (whole - own) / own,
                "drafting, of the own pass": draft / own,
                "correction, of drafting": median["correction"] / draft,
                "speedup of decoding": sum(self.plain) / sum(self.assisted),
            },
        }


def measure(arguments):
    target, tokenizer, drafters = load(arguments)
    device = target.device
    prompts = [json.loads(line)["prompt"] for line in Path(arguments.prompts).read_text().splitlines()]
    kwargs = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    measured, singles = {name: Measured() for name in drafters}, []
    for number, prompt in enumerate([prompts[0], *prompts[: arguments.num_prompts]]):
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = inputs.to(device)
        prompt_length = inputs["input_ids"].shape[1]
        start = now(device)
        plain = target.generate(**inputs, **kwargs)
        plain_time = now(device) - start
        context = prompt_length + (plain.shape[1] - prompt_length) // 2
        singles.append(own_pass(target, context, 1))
        for name, drafter in drafters.items():
            own = own_pass(target, context, drafter.config.num_draft_tokens + 1)
            drafts = nullcontext() if arguments.drafter else oracle(plain[0, prompt_length:], arguments.oracle_rate)
            timers = timed_parts(device), watch_passes(target, every=True)
            with drafts, track_acceptance() as acceptance, timers[0] as seconds, timers[1] as passes:
                start = now(device)
                assisted = target.generate(**inputs, **kwargs, assistant_model=drafter)
                assisted_time = now(device) - start
            if number == 0:  # warm-up
                continue
            of, prefill = measured[name], passes[0].seconds
            of.parts["verify"] += [one.seconds for one in passes[1:]]
            # The first call of each of these reads the prompt.
            for part, values in seconds.items():
                of.parts[part] += values[1:] if part in ("features", "backbone") else values
            of.rounds.append((assisted_time - prefill) / len(acceptance.lengths))
            of.own.append(own)
            of.plain.append(plain_time - prefill)
            of.assisted.append(assisted_time - prefill)
            of.lengths += acceptance.lengths
            of.agreed += torch.equal(plain, assisted)
            if number <= arguments.show and name == next(iter(drafters)):
                show(prompt, tokenizer, plain, assisted, prompt_length, acceptance)
    return {
        "target": f"random weights, {Path(arguments.shape).stem}"
        if arguments.shape
        else str(arguments.target or "SmolLM2-135M-Instruct"),
        "drafter": arguments.drafter
        or f"random weights, 3 layers; drafts of an oracle, right at {arguments.oracle_rate}",
        "dtype": arguments.dtype,
        "prompts": arguments.num_prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "machine": f"{platform.machine()}, {device.type}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "own pass over 1 token, ms": 1e3 * statistics.median(singles),
        "results": {name: of.summary() for name, of in measured.items()},
    }


def show(prompt, tokenizer, plain, assisted, prompt_length, acceptance):
    print(f"\n{prompt}\n")
    for name, ids in (("plain", plain), ("assisted", assisted)):
        print(f"{name}: {tokenizer.decode(ids[0, prompt_length:], skip_special_tokens=True)}\n")
    both = min(plain.shape[1], assisted.shape[1])
    differs = (plain[0, :both] != assisted[0, :both]).nonzero()
    print(f"first difference: {f'new token {differs[0].item() - prompt_length}' if len(differs) else 'none'}")
    print(f"tokens kept in each round: {acceptance.lengths}")


def main():
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--shape", help="a target's config.json: random weights of that shape, the tokenizer of --target"
    )
    parser.add_argument("--drafter", help="folder or Hub id; default: random weights with an oracle")
    parser.add_argument("--prompts", default=here / "prompts.jsonl", help="JSON lines with a `prompt`")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16], help="of the random drafters")
    parser.add_argument(
        "--variants",
        type=lambda text: tuple(None if part == "all" else int(part) for part in text.split("/")),
        nargs="+",
        default=[(None, None), (64, None), (64, 4096)],
        help="correction candidates / draft vocabulary, as in all/all 64/4096",
    )
    parser.add_argument("--oracle-rate", type=float, default=0.75)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", type=int, default=1, help="prompts to print side by side")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(f"\ntarget's own pass over 1 token: {result['own pass over 1 token, ms']:.1f} ms")
    for name, of in result["results"].items():
        print(f"\n{name}")
        print("  ms      " + ", ".join(f"{part} {value:.1f}" for part, value in of["ms"].items()))
        print("  ratios  " + ", ".join(f"{ratio} {value:.2f}" for ratio, value in of["ratios"].items()))
        print(
            f"  acceptance length {of['acceptance_length']:.2f}, same tokens as plain on "
            f"{of['prompts_with_the_same_tokens']} of {result['prompts']} prompts"
        )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
