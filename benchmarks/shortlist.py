"""How many drafts change when only the likeliest tokens of a slot are corrected, and what that does to acceptance.

    python benchmarks/shortlist.py --target FOLDER_OR_ID --drafter FOLDER_OR_ID --out shortlist.json

Every round of the exact drafter is drafted once more with each shortlist, from the same hidden vectors. Then whole
calls are made with each shortlist, and with the drafter's own draft vocabulary if it has one.

With `--tokenizer` target and drafter are first carried over to that tokenizer's vocabulary, which shows what a larger
one does without a model trained for it: tokens that both have keep their rows, others get the mean of their pieces'.
"""

import argparse
import copy
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoCandidateGenerator, DominoDrafter, track_acceptance
from hf_domino.demo_target import demo_target
from hf_domino.training.data import read_prompts


def counting_differences(candidates, differs):
    """`correct` of the exact drafter, which also counts the rounds whose drafts are others with a shortlist."""
    correct = DominoCandidateGenerator.correct

    def counted(self, *args):
        exact = correct(self, *args)
        for self.num_candidates in candidates:
            differs[self.num_candidates] += not torch.equal(correct(self, *args)[0], exact[0])
        self.num_candidates = None
        differs["rounds"] += 1
        return exact

    return mock.patch.object(DominoCandidateGenerator, "correct", counted)


def carry_over(target, drafter, tokenizer, new_tokenizer, vocab_size):
    """Target and drafter (without its draft vocabulary) with the tokens of another tokenizer.

    Rows of embeddings, output head and W2 are copied for tokens that both tokenizers have; another token has the mean
    of the rows of its pieces in the first one, and an unused id zeros. The last id becomes the mask token.
    """
    old, new = tokenizer.get_vocab(), new_tokenizer.get_vocab()
    special = set(new_tokenizer.all_special_ids) | set(new_tokenizer.added_tokens_decoder)
    pieces = [[] for _ in range(vocab_size)]
    for token, i in new.items():
        if token in old:
            pieces[i] = [old[token]]
        elif i not in special:
            pieces[i] = tokenizer(new_tokenizer.decode([i]), add_special_tokens=False).input_ids
    pieces[-1] = [drafter.config.mask_token_id]

    def carried(model, wide_weights, **fields):
        config = copy.deepcopy(model.config)
        config.update({"vocab_size": vocab_size, **fields})
        weights = model.state_dict()
        for name in wide_weights:
            rows = weights[name]
            weights[name] = rows.new_zeros(vocab_size, rows.shape[1])
            for row, ids in zip(weights[name], pieces):
                if ids:
                    row.copy_(rows[ids].float().mean(0))
        other = type(model)(config).to(model.device, model.dtype).eval()
        other.load_state_dict(weights)
        return other

    drafter.set_draft_vocabulary(None)
    wide = (target.get_input_embeddings(), target.get_output_embeddings())
    names = [f"{name}.weight" for name, part in target.named_modules() if part in wide]
    ids = {
        f"{kind}_token_id": new[tokenizer.decode([i])]
        for kind in ("bos", "eos", "pad")
        if (i := getattr(target.config, f"{kind}_token_id", None)) is not None
    }
    new_tokenizer.chat_template, new_tokenizer.pad_token = tokenizer.chat_template, tokenizer.pad_token
    new_target = carried(target, names, **ids)
    new_target.generation_config.update(**ids)
    return new_target, carried(drafter, ["embed_proj.2.weight"], mask_token_id=vocab_size - 1), new_tokenizer


def measure(arguments):
    folder = arguments.target or demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drafter = DominoDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype).to(arguments.device).eval()
    if arguments.tokenizer:
        other = AutoTokenizer.from_pretrained(arguments.tokenizer)
        target, drafter, tokenizer = carry_over(target, drafter, tokenizer, other, arguments.vocab_size or len(other))
    own = drafter.draft_vocabulary
    prompts = read_prompts(arguments.prompts)[: arguments.num_prompts]

    def mean_length(candidates, vocabulary=None):
        drafter.set_draft_vocabulary(vocabulary)
        drafter.config.num_correction_candidates = candidates
        with track_acceptance() as acceptance:
            for prompt in prompts:
                inputs = tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                target.generate(
                    **inputs.to(target.device),
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=arguments.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                )
        return acceptance.mean

    differs = Counter()
    with counting_differences(arguments.candidates, differs):
        lengths = {"all": mean_length(None)}
    lengths |= {str(k): mean_length(k) for k in arguments.candidates}
    if own is not None:
        smallest = min(arguments.candidates)
        lengths[f"all of {len(own)} tokens"] = mean_length(None, own)
        lengths[f"{smallest} of {len(own)} tokens"] = mean_length(smallest, own)
    rounds = differs.pop("rounds")
    return {
        "drafter": Path(arguments.drafter).name,
        "vocabulary": drafter.config.vocab_size,
        "prompts": len(prompts),
        "rounds": rounds,
        "share_of_blocks_that_differ": {str(k): differs[k] / rounds for k in arguments.candidates},
        "acceptance_length": lengths,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", required=True, help="folder or Hub id of a Domino drafter")
    parser.add_argument("--tokenizer", help="folder or Hub id: carry target and drafter over to its vocabulary")
    parser.add_argument("--vocab-size", type=int, help="of that vocabulary, unused ids included; default: none unused")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "prompts.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--candidates", type=int, nargs="+", default=[16, 64, 256, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    result = json.dumps(measure(arguments), indent=2)
    print(result)
    if arguments.out:
        Path(arguments.out).write_text(result + "\n")


if __name__ == "__main__":
    main()
