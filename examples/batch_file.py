"""Answer a file of prompts: JSON lines in, JSON lines out. Killed, it goes on when the same command is given again.

    python examples/batch_file.py prompts.jsonl answers.jsonl
    python examples/batch_file.py prompts.jsonl answers.jsonl --target FOLDER_OR_ID --drafter FOLDER_OR_ID

A line of the input has a "prompt" (text) or "messages" (role and content); its other fields are copied to the output.
The answers are greedy, so in float32 they are the same with a drafter as without.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_domino
from hf_domino.demo import demo_drafter
from hf_domino.demo_target import demo_target


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def finished_rows(path: Path) -> int:
    """How many answers are in the output already; a line that a kill cut short is removed."""
    if not path.exists():
        return 0
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0] + whole[1]))
    return len(read_rows(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--target", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    arguments = parser.parse_args()

    rows = read_rows(arguments.prompts)
    done = finished_rows(arguments.answers)
    name = arguments.target or demo_target()
    tokenizer = AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=arguments.dtype).to(arguments.device).eval()
    drafter = hf_domino.DominoDrafter.from_pretrained(arguments.drafter or demo_drafter(), dtype=arguments.dtype)
    drafter.to(arguments.device).eval()
    kwargs = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    with (
        open(arguments.answers, "a", encoding="utf-8") as out,
        tqdm(rows[done:], initial=done, total=len(rows)) as bar,
        hf_domino.track_acceptance() as acceptance,
    ):
        for row in bar:
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(target.device)
            output = target.generate(**inputs, **kwargs, assistant_model=drafter)
            new = output[0, inputs["input_ids"].shape[1] :]
            answer = tokenizer.decode(new, skip_special_tokens=True)
            print(json.dumps({**row, "answer": answer, "new_tokens": len(new)}), file=out, flush=True)
            bar.set_postfix_str(f"{acceptance.mean:.2f} tokens a round")


if __name__ == "__main__":
    main()
