"""Chat in the terminal with a target and its drafter. Each turn goes on with the cache of the one before.

    python examples/chat.py                                          # SmolLM2-135M-Instruct and its drafter
    python examples/chat.py --target FOLDER_OR_ID --drafter FOLDER_OR_ID --temperature 0.7

An empty line or Ctrl-D ends it.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_domino
from hf_domino.demo import demo_drafter
from hf_domino.demo_target import demo_target


class Chat:
    """A conversation and the target's cache of it."""

    def __init__(self, target, drafter, tokenizer, **settings):
        self.target, self.drafter, self.tokenizer, self.settings = target, drafter, tokenizer, settings
        self.messages, self.seen, self.cache = [], [], {}

    def answer(self, text: str, streamer=None) -> str:
        """Say something; returns what the target answers. The streamer gets it token by token."""
        self.messages.append({"role": "user", "content": text})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.target.device)
        prompt = inputs["input_ids"][0].tolist()
        if prompt[: len(self.seen)] != self.seen:  # the template wrote earlier turns anew: the cache is of another text
            self.cache = {}
        output = self.target.generate(
            **inputs,
            **self.cache,
            **self.settings,
            assistant_model=self.drafter,
            streamer=streamer,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
        )
        name = "cache" if "cache" in output else "past_key_values"  # transformers renamed it
        self.cache, self.seen = {name: output[name]}, output["sequences"][0].tolist()
        answer = self.tokenizer.decode(self.seen[len(prompt) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()

    name = arguments.target or demo_target()
    tokenizer = AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=arguments.dtype).to(arguments.device).eval()
    drafter = hf_domino.DominoDrafter.from_pretrained(arguments.drafter or demo_drafter(), dtype=arguments.dtype)
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if settings["do_sample"]:
        settings["temperature"] = arguments.temperature
    chat = Chat(target, drafter.to(arguments.device).eval(), tokenizer, **settings)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            break
        if not text:
            break
        start = time.perf_counter()
        with hf_domino.track_acceptance() as acceptance:
            chat.answer(text, streamer)
        seconds = time.perf_counter() - start
        print(f"  ({acceptance.mean:.2f} tokens a round, {sum(acceptance.lengths) / seconds:.0f} tokens a second)\n")


if __name__ == "__main__":
    main()
