"""What a drafter gains: every method on the same prompts, side by side, written down so that it can be checked.

run_bench           the command: loads, measures set by set, writes result.json and the report
Bench               one target and its methods: warm-up, interleaved calls, where a round's time goes
bytes_of_a_round    the weights that a round reads
"""

import importlib.metadata
import json
import platform
import re
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..target import Target
from ..training.data import ChatFormat, stop_ids
from .methods import METHODS, build_methods, chosen_methods
from .prompts import SETS, read_set, spread
from .summary import summarise, whole_rounds
from .timing import DRAFTING_PARTS, now, own_pass, rounds_of, timed_parts, watch_passes

RESULT_FILE = "result.json"


def _option(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class BenchOptions:
    """Measure what a drafter gains over plain generate() and over other ways of drafting, all in one run.

    Writes result.json, after every set, then a table and plots; `hf-domino report` makes those again.
    """

    target: str = field(metadata={"help": "The target: a folder or a model on the Hub."})
    out: str = field(metadata={"help": "The folder of the results."})
    drafter: str | None = _option(None, "A Domino drafter.")
    dflash: str | None = _option(None, "A DFlash drafter.")
    eagle3: str | None = _option(None, "An EAGLE-3 drafter.")
    assistant: str | None = _option(None, "An ordinary small model as the assistant.")
    methods: list[str] | None = _option(None, f"Of {', '.join(METHODS)}. Default: all that the models given allow.")
    sets: list[str] = field(
        default_factory=lambda: list(SETS),
        metadata={"help": f"Of {', '.join(SETS)} (from the Hub), JSONL or Parquet files, or NAME=FILE."},
    )
    num_prompts: int | None = _option(32, "Prompts of each set, at even distances through it.")
    plain_prompts: int | None = _option(None, "Decode only so many of a set plainly; speedup is over those.")
    profile_prompts: int = _option(3, "Prompts of each set on which the parts of a round are timed, in calls apart.")
    max_new_tokens: int = _option(256, "Room for each answer.")
    repeats: int = _option(1, "Calls of each method on each prompt; the one of median time is kept.")
    warmup: int = _option(2, "Calls of each method before anything is measured.")
    do_sample: bool = _option(False, "Sample. Default: greedy.")
    temperature: float | None = _option(None, "Default: the target's own.")
    top_p: float | None = _option(None, "Default: the target's own.")
    top_k: int | None = _option(None, "Default: the target's own.")
    seed: int = _option(0, "Of the samples.")
    enable_thinking: bool | None = _option(None, "For chat templates that know it.")
    dtype: str = _option("auto", "Of the target; all other models take it over.")
    attn_implementation: str | None = _option(None, "The target's attention. Default: transformers' choice.")
    device: str | None = _option(None, "Of all models. Default: the first accelerator, else the CPU.")


def run_bench(options: BenchOptions) -> None:
    from .report import write_report

    names = chosen_methods(options)
    sets = dict(read_set(source) for source in options.sets)
    if len(sets) < len(options.sets):
        raise ValueError(f"Two of the sets {', '.join(options.sets)} have the same name: use NAME=FILE.")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    given = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype, **given)
    target = target.to(options.device or accelerator).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    methods, skipped = build_methods(names, options, target, tokenizer)
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k") if options.do_sample}
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": options.do_sample,
        **{name: value for name, value in sampling.items() if value is not None},
    }
    bench = Bench(target, tokenizer, methods, settings, options.seed, options.enable_thinking, options.repeats)
    sets = {name: spread(conversations, options.num_prompts) for name, conversations in sets.items()}
    bench.warm_up(next(iter(sets.values()))[0], options.warmup)
    given = {name: public_name(value) for name, value in asdict(options).items() if name != "out"}
    bench.result |= {"options": given, "skipped": skipped | bench.result["skipped"]}
    for name, reason in bench.result["skipped"].items():
        print(f"{name} is left out: {reason}")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    total = sum(bench.num_calls(conversations, options.plain_prompts) for conversations in sets.values())
    with tqdm(total=total, unit="call") as bar:
        for name, conversations in sets.items():
            bench.measure_set(name, conversations, options.plain_prompts, bar)
            bench.profile_set(name, spread(conversations, options.profile_prompts))
            bench.measure_bounds(name)
            bench.result["summary"] = summarise(bench.result)
            save(bench.result, out / RESULT_FILE)
    print(write_report([bench.result], out))


# ---- measuring


class Bench:
    """One target and its methods under the same conditions.

    Args:
        target: a causal language model in eval mode, on its device.
        tokenizer: its tokenizer, with its chat template.
        methods: a list of [`Method`]s. Speedup and agreement are to the one called "plain".
        settings: what generate() is told in every call, room and sampling; stops and padding are added.
        seed: of the samples.
        enable_thinking: for chat templates that know it.
        repeats: calls of each method on each turn, of which the one of median time per token counts.

    Attributes:
        result: everything seen so far; JSON takes it.

    Raises:
        ValueError: `repeats` is below 1.
    """

    def __init__(self, target, tokenizer, methods, settings, seed=0, enable_thinking=None, repeats=1):
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, but is {repeats}.")
        self.target, self.methods, self.seed, self.repeats = target, list(methods), seed, repeats
        self.chat = ChatFormat(tokenizer, enable_thinking)
        self.stop_ids = stop_ids(target, tokenizer)
        pad = tokenizer.pad_token_id
        self.settings = {
            **settings,
            "eos_token_id": sorted(self.stop_ids),
            "pad_token_id": min(self.stop_ids) if pad is None else pad,
            "return_dict_in_generate": False,
        }
        self.num_prompts = 0
        self.result = {
            "machine": machine(target.device),
            "versions": versions(),
            "target": public_name(target.config._name_or_path),
            "settings": self.settings,
            "skipped": {},
            "conditions": {},
            "drafters": {one.name: describe(one.drafter) for one in self.methods if one.drafter is not None},
            "records": [],
            "profile": [],
            "own_pass": [],
            "summary": [],
        }

    def warm_up(self, conversation, count: int) -> None:
        """Run each method `count` times on a conversation's first turn; a peer that fails is left out for good."""
        inputs = self._encode(self._turns(conversation)[0])
        for method in list(self.methods):
            try:
                for _ in range(count):
                    self._call(method, inputs)
            except Exception as error:
                if method.name == "plain" or method.drafter is not None:
                    raise
                self.methods.remove(method)
                self.result["skipped"][method.name] = f"{type(error).__name__}: {error}"

    def num_calls(self, conversations, plain_prompts=None) -> int:
        turns = [len(self._turns(one)) for one in conversations]
        saved = 0
        if any(method.name == "plain" for method in self.methods):
            saved = sum(turns) - sum(spread(turns, plain_prompts))
        return self.repeats * (sum(turns) * len(self.methods) - saved)

    def measure_set(self, name, conversations, plain_prompts=None, bar=None) -> None:
        """Run every method on every turn. Their order rotates, so that a drifting machine hits all alike.

        Later turns have the first method's answers in their context, plain's where it runs: the same for all methods.
        """
        with_plain = set(spread(list(range(len(conversations))), plain_prompts))
        for index, conversation in enumerate(conversations):
            first = self.num_prompts % len(self.methods)
            self.num_prompts += 1
            order = self.methods[first:] + self.methods[:first]
            order = [method for method in order if method.name != "plain" or index in with_plain]
            context = []
            for turn, messages in enumerate(self._turns(conversation)):
                context += messages
                inputs = self._encode(context)
                if not self._has_room(inputs):
                    tqdm.write(f"{name}, prompt {index}: turn {turn} has no room in the target's context, left out.")
                    break
                calls, answers, records = defaultdict(list), {}, {}
                for method in order * self.repeats:
                    torch.manual_seed(self.seed + self.num_prompts)
                    calls[method.name].append(self._measure(method, inputs))
                    if bar is not None:
                        bar.set_postfix_str(f"{name}, {method.name}", refresh=False)
                        bar.update()
                for own, of_method in calls.items():
                    # Not of equal length where near ties fall differently: time a token, and one whole call.
                    of_method.sort(key=lambda call: call[0]["decode_seconds"] / call[0]["tokens"])
                    record, answers[own] = of_method[(len(of_method) - 1) // 2]
                    records[own] = {"set": name, "prompt": index, "turn": turn, "method": own, **record}
                for own, record in records.items():
                    compared = "plain" in answers and not self.settings["do_sample"]
                    record["first_difference"] = first_difference(answers["plain"], answers[own]) if compared else None
                    record["same_as_plain"] = answers["plain"] == answers[own] if compared else None
                self.result["records"] += records.values()
                answer = next(answers[method.name] for method in self.methods if method.name in answers)
                context.append({"role": "assistant", "content": self.chat.text(answer, self.stop_ids)})

    def profile_set(self, name, conversations) -> None:
        """Where a round's time goes, in calls of their own: reading the clock at every part holds a device up."""
        pooled = {method.name: defaultdict(float) for method in self.methods}
        for conversation in conversations:
            inputs = self._encode(self._turns(conversation)[0])
            for method in self.methods:
                with timed_parts(self.target.device) as seconds:
                    _, passes, total = self._call(method, inputs, every=True)
                if len(passes) > 2:
                    parts = parts_of_a_call(seconds, passes, total)
                    for part, value in parts.items():
                        pooled[method.name][part] += value
                    pooled[method.name]["rounds"] += len(passes) - 1
        for method, parts in pooled.items():
            if rounds := parts.pop("rounds", 0):
                ms = {part: 1e3 * value / rounds for part, value in parts.items()}
                self.result["profile"].append({"set": name, "method": method, "rounds": int(rounds), "ms": ms})

    def measure_bounds(self, name) -> None:
        """The target's own pass over a round's tokens, and the weights that a round reads."""
        records = [one for one in self.result["records"] if one["set"] == name]
        if not records:
            return
        context = int(statistics.median(one["prompt_tokens"] + one["tokens"] // 2 for one in records))
        drafted = {method.name: [] for method in self.methods}
        for one in records:
            drafted[one["method"]] += [width for _, width in whole_rounds(one, self.settings["max_new_tokens"])]
        usual = {method: round(statistics.mean(widths)) for method, widths in drafted.items() if widths}
        seconds = {n: own_pass(self.target, context, n) for n in sorted({1, *(n + 1 for n in usual.values())})}
        for method in self.methods:
            if method.name in usual:
                count = usual[method.name]
                row = {"set": name, "method": method.name, "context": context, "drafted": count}
                row |= {"one_token_ms": 1e3 * seconds[1], "round_ms": 1e3 * seconds[count + 1]}
                if method.drafter is not None:
                    row["bytes"] = bytes_of_a_round(self.target, method.drafter, count)
                self.result["own_pass"].append(row)

    def _turns(self, conversation) -> list[list[dict]]:
        """The messages up to each user turn, beyond those of the turn before."""
        turns, messages = [], []
        for message in conversation:
            messages.append(message)
            if message["role"] == "user":
                turns.append(messages)
                messages = []
        return turns

    def _encode(self, messages) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self.chat.context_ids(messages)], device=self.target.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _has_room(self, inputs) -> bool:
        limit = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return limit is None or inputs["input_ids"].shape[1] + self.settings["max_new_tokens"] <= limit

    def _call(self, method, inputs, every=False):
        """Token ids [1, T], the target's passes, and seconds of the whole call."""
        device = self.target.device
        with watch_passes(self.target, every) as passes:
            start = now(device)
            sequences = method.run(inputs, self.settings)
            total = now(device) - start
        return sequences, passes, total

    def _measure(self, method, inputs) -> tuple[dict, list[int]]:
        """One call's record, and the answer's token ids."""
        device = self.target.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        sequences, passes, total = self._call(method, inputs)
        self.result["conditions"][method.name] = {
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "attention": self.target.config._attn_implementation,
            "cache": passes[-1].cache,
            "max_new_tokens": self.settings["max_new_tokens"],
        }
        prompt_length = inputs["input_ids"].shape[1]
        answer = sequences[0, prompt_length:].tolist()
        kept, drafted = rounds_of(passes, sequences.shape[1])
        record = {
            "prompt_tokens": prompt_length,
            "tokens": len(answer),
            "prefill_seconds": passes[0].seconds,
            "decode_seconds": total - passes[0].seconds,
            "kept": kept,
            "drafted": drafted,
            "stopped": answer[-1] in self.stop_ids,
            "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        }
        return record, answer


def parts_of_a_call(seconds, passes, total) -> dict[str, float]:
    """Seconds of a call by part, summed over its rounds; the prompt's passes through target and drafter are apart.

    Args:
        seconds: from [`timed_parts`]; empty where another generator drafted.
        passes: from [`watch_passes`], all of them timed.
        total: seconds of the call.
    """
    parts, reading = {}, 0.0
    for name in DRAFTING_PARTS:
        if values := seconds.get(name, []):
            parts[name] = sum(values)
            if name in ("features", "backbone") and len(values) > 1:  # the first call takes in the whole prompt
                extra = values[0] - statistics.median(values[1:])
                parts[name] -= extra
                reading += extra
    parts["verify"] = sum(one.seconds for one in passes[1:])
    rest = total - passes[0].seconds - reading - sum(parts.values())
    is_peer = not seconds and any(one.width > 1 for one in passes[1:])
    parts["drafting and rest" if is_peer else "rest"] = rest
    return parts


def first_difference(plain: list[int], other: list[int]) -> int | None:
    """The first new token that differs, counted from 0; None where the answers are equal."""
    if plain == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))


def bytes_of_a_round(target, drafter, num_drafts: int) -> dict[str, int]:
    """Weights read in a round of `num_drafts` drafts, in bytes, each time they are read; caches are not counted."""

    def size(*modules):
        tensors = {id(tensor): tensor for module in modules for tensor in module.parameters()}
        return sum(tensor.nbytes for tensor in tensors.values())

    config, head, embeddings = drafter.config, target.get_output_embeddings(), target.get_input_embeddings()
    rows = config.draft_vocabulary_size or config.vocab_size
    is_tied = getattr(head, "weight", None) is embeddings.weight
    parts = {
        "target": size(target) - (0 if is_tied else size(embeddings)),
    }
    if config.method == "eagle3":  # all but the projection of the features is read for every draft
        parts["backbone"] = size(drafter.fc) + num_drafts * size(drafter.midlayer, drafter.norm)
        return parts | {"output head": num_drafts * size(drafter.lm_head)}
    parts["backbone"] = size(drafter.fc, drafter.hidden_norm, drafter.layers, drafter.norm)
    parts["output head"] = size(head) * rows // config.vocab_size
    if config.head == "domino":
        corrected = max(0, num_drafts - config.num_uncorrected_tokens)
        weights = drafter.head_weights(Target(target))
        parts["correction"] = weights.bytes_read(num_drafts, corrected, config.num_correction_candidates)
    return parts


# ---- what the numbers belong to


def machine(device) -> dict:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("hf-domino")
    except importlib.metadata.PackageNotFoundError:
        own = "from source"
    return {
        "hf_domino": own,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def public_name(value):
    """Names on the Hub and values as they are; of files and folders here the last part of the path alone."""
    if isinstance(value, list):
        return [public_name(one) for one in value]
    if not isinstance(value, str):
        return value
    name, is_named, path = value.rpartition("=")
    return name + is_named + Path(path).name if Path(path).exists() else value


def describe(drafter) -> dict:
    names = "head block_size num_draft_tokens num_hidden_layers draft_vocabulary_size num_correction_candidates"
    return {
        "name": public_name(drafter.config._name_or_path),
        "dtype": str(drafter.dtype).removeprefix("torch."),
        **{name: getattr(drafter.config, name, None) for name in names.split()},
    }


def peak_resident() -> int | None:
    """Peak memory of this process so far, in bytes: all methods together, which is all that a CPU tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    # Kilobytes, but on macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def save(result: dict, file: Path) -> None:
    result["peak_resident"] = peak_resident()
    unfinished = file.with_suffix(".tmp")
    text = re.sub(r"\[[-\d.,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(result, indent=1))
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(file)
