"""What a round costs on a GPU, part by part, against the bytes that it has to read.

    python benchmarks/gpu_round.py                 # Qwen3-8B's shape and the published drafter's, about 23 GB of memory
    python benchmarks/gpu_round.py --size tiny     # the same on anything, in seconds

Weights are random and made on the device; nothing is downloaded. Times the target's pass over one token and over a
block, the parts of drafting (features, backbone, output head, correction) as they are (eager), compiled, replayed as a
CUDA graph, and both, and drafting as a whole. What can't be run is named with the reason. Every call is timed among
calls of its own kind, so parts smaller than the device's cache may read from there: their share of the bandwidth can
then exceed one.
"""

import argparse
import json
import platform
import statistics
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import DynamicCache, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer

from hf_domino import DominoCandidateGenerator, DominoConfig, DominoDrafter
from hf_domino.assisted_generation import _CACHE

# Domino, arXiv 2605.29707, table 1: Qwen3-8B, greedy, one A100; acceptance length tau and speedup.
PAPER = {"GSM8K": (10.03, 7.92), "average of its eight sets": (7.17, 5.49)}
SIZES = {
    "published": {
        "target": dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "drafter": dict(num_hidden_layers=5, block_size=16, target_layer_ids=[1, 9, 17, 25, 33]),
        "contexts": [1024, 8192],
        "candidates": [None, 256, 64],
        "vocabularies": [None, 32000],
        "copy": 2**31,
    },
    "tiny": {
        "target": dict(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        ),
        "drafter": dict(
            num_hidden_layers=1, block_size=4, target_layer_ids=[0, 1], causal_state_size=16, correction_rank=8
        ),
        "contexts": [16, 32],
        "candidates": [None, 4],
        "vocabularies": [None, 20],
        "copy": 2**24,
    },
}
MODES = ("eager", "compiled", "graph", "compiled graph")


# What is measured


def random_model(cls, config, device, dtype):
    """A model with random weights, made on the device in its dtype."""
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            nn.init.ones_(weight) if name.endswith("norm.weight") else nn.init.normal_(weight, std=0.02)
    # Its frequencies are no parameters: what was made without memory has none.
    for module in model.modules():
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = type(module.rotary_emb)(config).to(device)
    return model.eval()


class FixedLayer(DynamicLayer):
    """A cache layer that holds the same context for every pass: what a pass appends, the next one writes over."""

    def __init__(self, keys, values, length):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.length = keys, values, length

    def update(self, key_states, value_states, *args, **kwargs):
        end = self.length + key_states.shape[-2]
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_seq_length(self):
        return self.length


class Setting:
    """A target and a drafter, and the parts of a round as calls without arguments."""

    def __init__(self, size, device, dtype):
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.target = random_model(
            Qwen3ForCausalLM, Qwen3Config(**size["target"], tie_word_embeddings=False), device, dtype
        )
        config = DominoConfig.for_target(
            self.target.config, mask_token_id=size["target"]["vocab_size"] - 1, **size["drafter"]
        )
        self.drafter = random_model(DominoDrafter, config, device, dtype)
        self.block = config.num_draft_tokens + 1
        self.anchor = self.random_ids(1)

    def random_ids(self, count):
        return torch.randint(self.target.config.vocab_size, (1, count), device=self.device)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def target_pass(self, context, count, grows=False):
        """The target over `count` tokens; with `grows` the cache is the one that generate() has, grown and cut back."""
        config = self.target.config
        shape = (1, config.num_key_value_heads, context + (0 if grows else count), config.head_dim)
        cache = DynamicCache(config=config)
        for i in range(config.num_hidden_layers):
            keys, values = self.random(*shape), self.random(*shape)
            if grows:
                cache.update(keys, values, i)
            else:
                cache.layers[i] = FixedLayer(keys, values, context)
        ids = self.random_ids(count)
        inputs = {"use_cache": True, _CACHE: cache}
        if not grows:
            # Made here, as a graph can't take new numbers from the host: each token sees itself and what is before.
            positions = torch.arange(context, context + count, device=self.device)
            seen = torch.arange(context + count, device=self.device) <= positions[:, None]
            mask = seen[None, None] if count > 1 else None
            inputs |= {"position_ids": positions[None], "attention_mask": {"full_attention": mask}}

        def call():
            logits = self.target(ids, **inputs).logits
            if grows:
                cache.crop(-count)
            return logits

        heads = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        weights = sum(p.numel() for p in self.target.parameters()) - self.target.get_input_embeddings().weight.numel()
        return call, self.bytes_of(weights + heads * (context + count))

    def generator(self, candidates=None, vocabulary=None):
        """Our own generator, for the parts of drafting."""
        self.drafter.set_draft_vocabulary(None if vocabulary is None else range(vocabulary))
        call = GenerationConfig(max_length=2**20, do_sample=False)
        call.num_correction_candidates = candidates
        generator = DominoCandidateGenerator(self.drafter, self.target, call)
        self.drafter.set_draft_vocabulary(None)
        return generator

    def features(self):
        generator, config = self.generator(), self.drafter.config
        layers = self.target.config.num_hidden_layers
        states = tuple(self.random(1, self.block, config.target_hidden_size) for _ in range(layers))

        def call():
            generator.has_read_prompt, generator.new_features = True, []
            generator.observe_pass(states, {}, self.block, self.anchor)
            return generator.new_features[0]

        return call, self.bytes_of(2 * self.block * self.drafter.fc.in_features)

    def behind(self, context, generator):
        """Puts a generator where a block was just accepted as a whole, always behind the same context."""
        features = self.random(1, self.block, self.drafter.fc.in_features)
        generator.new_features = [self.random(1, context, self.drafter.fc.in_features)]
        generator.backbone(generator.target.embed(self.anchor))  # fills the context

        def reset():
            generator.new_features, generator.context.length = [features], context

        return reset

    def backbone(self, context):
        generator, config = self.generator(), self.drafter.config
        ids = torch.full((1, config.block_size), config.mask_token_id, device=self.device)
        reset = self.behind(context, generator)

        def call():
            reset()
            return generator.backbone(generator.target.embed(ids))

        head = ("prefix_gru.", "embed_proj.")
        weights = sum(p.numel() for name, p in self.drafter.named_parameters() if not name.startswith(head))
        cached = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * (context + self.block)
        return call, self.bytes_of(weights + cached)

    def output_head(self, vocabulary):
        generator, config = self.generator(vocabulary=vocabulary), self.drafter.config
        hidden = self.random(1, config.num_draft_tokens, config.hidden_size)
        rows = vocabulary or config.vocab_size
        return lambda: generator.base_logits(hidden), self.bytes_of(rows * config.hidden_size)

    def correction(self, candidates, vocabulary):
        generator, config = self.generator(candidates, vocabulary), self.drafter.config
        hidden = self.random(1, config.num_draft_tokens, config.hidden_size)
        base = generator.base_logits(hidden)
        embedding = self.random(1, config.hidden_size)

        def call():
            return generator.correct(hidden, base, embedding, self.anchor)[0]

        corrected = config.num_draft_tokens - config.num_uncorrected_tokens
        read = generator.weights.bytes_read(config.num_draft_tokens, corrected, candidates)
        return call, read + base.numel() * base.element_size()

    def drafting(self, context, candidates, vocabulary):
        """All parts but the features, in one call: what a graph of a whole round would replay."""
        generator, count = self.generator(candidates, vocabulary), self.drafter.config.num_draft_tokens
        reset = self.behind(context, generator)

        def call():
            reset()
            return generator.draft(self.anchor, count)[0]

        parts = self.backbone(context), self.output_head(vocabulary), self.correction(candidates, vocabulary)
        return call, sum(read for _, read in parts)

    @contextmanager
    def compiled_drafter(self, **options):
        """Inside, the drafter is as `drafter.compile()` leaves it."""
        before = dict(vars(self.drafter))
        self.drafter.compile(**options)
        try:
            yield
        finally:
            vars(self.drafter).clear()
            vars(self.drafter).update(before)

    def bytes_of(self, numbers):
        return numbers * self.dtype.itemsize


# How it is measured


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def milliseconds(call, device, seconds=0.25):
    """Median over samples of the mean time of a call, among enough of them in a row to fill `seconds`."""

    def sample(count):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / count

    sample(2)
    count = max(1, min(200, int(seconds / 5 / max(sample(1), 1e-7))))
    return 1e3 * statistics.median(sample(count) for _ in range(5))


def bandwidth(device, size):
    """Bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * size / (milliseconds(lambda: copy.copy_(source), device) / 1e3)


def captured(call, device):
    """The call as a CUDA graph. Returns a call that replays it, and its output, which every replay writes anew."""
    if device.type != "cuda":
        raise Unavailable("a CUDA graph needs a CUDA device")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay():
        graph.replay()
        return output

    return replay


def difference(output, reference):
    """Share of tokens that differ, or the largest difference of numbers over the largest number."""
    if not reference.is_floating_point():
        return (output != reference).float().mean().item()
    return ((output - reference).abs().max() / reference.abs().max()).item()


class Unavailable(Exception):
    """A variant that does not exist here."""


class Measurement:
    """Rows of results; what fails is a row with the reason."""

    def __init__(self, device, bandwidth, budget, backend, seconds):
        self.device, self.bandwidth, self.backend, self.seconds, self.rows = device, bandwidth, backend, seconds, []
        self.end = time.perf_counter() + budget

    def __call__(self, part, build, modes, **about):
        """Time one part in these modes. `build()` returns the call and the bytes that it has to read."""
        try:
            call, read = build()
            reference = call().clone()
        except Exception as error:
            for mode in modes:
                self.add({"part": part, **about, "mode": mode, "failed": reason(error)})
            return
        compiled = None
        for mode in modes:
            row = {"part": part, **about, "mode": mode}
            try:
                if "compiled" in mode and compiled is None:
                    compiled = self.compile(call, row)
                runs = compiled if "compiled" in mode else call
                if "graph" in mode:
                    runs = captured(runs, self.device)
                row["difference"] = difference(runs(), reference)
                row["ms"] = milliseconds(runs, self.device, self.seconds)
                row["bytes"] = read
                row["share_of_bandwidth"] = read / (row["ms"] / 1e3) / self.bandwidth
            except Exception as error:
                row["failed"] = reason(error)
            self.add(row)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, row):
        self.rows.append(row)
        print(shown(row), flush=True)

    def compile(self, call, row):
        if time.perf_counter() > self.end:
            raise Unavailable("the time for it is used up; raise --budget")
        torch._dynamo.reset()  # else calls from one place share a limit on how often they are compiled
        breaks = torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        compiled, start = torch.compile(call, dynamic=False, backend=self.backend), time.perf_counter()
        compiled()
        synchronize(self.device)
        row["compile_seconds"] = time.perf_counter() - start
        row["graph_breaks"] = sum(breaks.values())
        return compiled

    def ms(self, part, mode, **about):
        for row in self.rows:
            if row["part"] == part and row["mode"] == mode and about.items() <= row.items():
                return row.get("ms")
        return None

    def bytes(self, part, **about):
        found = [
            row["bytes"] for row in self.rows if row["part"] == part and about.items() <= row.items() and "ms" in row
        ]
        return found[0] if found else None


def reason(error):
    return (
        f"{'' if isinstance(error, Unavailable) else type(error).__name__ + ': '}{str(error).strip().splitlines()[0]}"
    )


def shown(row):
    about = {
        "part",
        "mode",
        "failed",
        "difference",
        "ms",
        "bytes",
        "share_of_bandwidth",
        "compile_seconds",
        "graph_breaks",
    }
    about = ", ".join(f"{name} {'all' if value is None else value}" for name, value in row.items() if name not in about)
    line = f"{row['part']:<22} {about:<36} {row['mode']:<15}"
    if "failed" in row:
        return f"{line} left out: {row['failed'][:120]}"
    notes = f"{row['difference']:.0e} off" if row["difference"] else ""
    if row.get("compile_seconds"):
        notes += f" compiled in {row['compile_seconds']:.0f} s, {row['graph_breaks']} graph breaks"
    return f"{line} {row['ms']:9.3f} ms {row['bytes'] / 1e6:9.1f} MB {row['share_of_bandwidth']:6.1%} {notes}"


def run(arguments):
    size = SIZES[arguments.size]
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are taken of the current one
    started = time.perf_counter()
    rate = bandwidth(device, size["copy"])
    print(f"a copy of {size['copy'] / 1e9:.2f} GB moves {rate / 1e9:.1f} GB/s")
    setting = Setting(size, device, dtype)
    spent = time.perf_counter() - started
    measure = Measurement(device, rate, arguments.budget - spent, arguments.backend, arguments.seconds)
    contexts, block = arguments.contexts or size["contexts"], setting.block
    variants = list(product(size["vocabularies"], size["candidates"]))
    # A compiled target takes minutes for every shape: only where it is asked for.
    with_target = [mode for mode in arguments.modes if arguments.compile_target or "compiled" not in mode]
    plain, compiled = ([m for m in arguments.modes if ("compiled" in m) == wanted] for wanted in (False, True))
    for context, count in product(contexts, sorted({1, block // 2 + 1, block})):
        about = {"context": context, "tokens": count}
        measure("target", partial(setting.target_pass, context, count), with_target, **about)
        grown = partial(setting.target_pass, context, count, grows=True)
        measure("target, growing cache", grown, ["eager"], **about)
    for context, (vocabulary, candidates) in product(contexts, variants if plain else []):
        about = {"context": context, "vocabulary": vocabulary, "candidates": candidates}
        measure("drafting", partial(setting.drafting, **about), plain, **about)
    # What is compiled comes last, and the cheapest to draft with first: a budget that runs out then hurts least.
    for modes in filter(None, (plain, compiled)):
        for context in contexts:
            measure("backbone", partial(setting.backbone, context), modes, context=context)
        measure("features", setting.features, modes)
        for vocabulary in reversed(size["vocabularies"]):
            measure("output head", partial(setting.output_head, vocabulary), modes, vocabulary=vocabulary)
        for vocabulary, candidates in reversed(variants):
            about = {"vocabulary": vocabulary, "candidates": candidates}
            measure("correction", partial(setting.correction, candidates, vocabulary), modes, **about)
    if compiled:  # what users get, of the cheapest round
        vocabulary, candidates = variants[-1]
        about = {"context": contexts[0], "vocabulary": vocabulary, "candidates": candidates}
        with setting.compiled_drafter(dynamic=False, backend=arguments.backend):
            measure("drafter.compile()", partial(setting.drafting, **about), plain, **about)
    result = {
        "size": arguments.size,
        "dtype": arguments.dtype,
        "block": block,
        "machine": {"device": device_name(device), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "copy_bytes_per_second": rate,
        "paper": {name: {"acceptance_length": tau, "speedup": speedup} for name, (tau, speedup) in PAPER.items()},
        "rows": measure.rows,
        "rounds": rounds(measure, contexts, variants, block, arguments.modes, with_target),
    }
    result["seconds"] = time.perf_counter() - started
    return result


def rounds(measure, contexts, variants, block, modes, target_modes):
    """Whole rounds put together from their parts: the efficiency, its bound, and the speedup at the paper's acceptance.

    Efficiency is a plain pass over one token by a round: drafting and a pass over the block. Speedup is tau times that.
    """
    found = []
    for context, (vocabulary, candidates), mode, target_mode in product(contexts, variants, modes, target_modes):
        parts = {
            "features": {},
            "backbone": {"context": context},
            "output head": {"vocabulary": vocabulary},
            "correction": {"vocabulary": vocabulary, "candidates": candidates},
        }
        ms = {part: measure.ms(part, mode, **about) for part, about in parts.items()}
        one, verify = (measure.ms("target", target_mode, context=context, tokens=count) for count in (1, block))
        if None in (one, verify, *ms.values()):
            continue
        draft = sum(ms.values())
        read = sum(measure.bytes(part, **about) for part, about in parts.items())
        one_read, verify_read = (measure.bytes("target", context=context, tokens=count) for count in (1, block))
        efficiency = one / (draft + verify)
        found.append(
            {
                "context": context,
                "vocabulary": vocabulary,
                "candidates": candidates,
                "mode": mode,
                "target_mode": target_mode,
                "ms": {**ms, "drafting": draft, "verify": verify, "plain pass": one},
                "efficiency": efficiency,
                "efficiency_bound": one / verify,
                "efficiency_bound_bytes": one_read / (verify_read + read),
                "projected_speedup": {name: tau * efficiency for name, (tau, _) in PAPER.items()},
            }
        )
    return found


def device_name(device):
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def report(result):
    print("\nWhole rounds: modes of drafting + target, their ms, efficiency, and speedup at tau", end=" ")
    print(", ".join(f"{tau} ({name}; the paper's own: {speedup})" for name, (tau, speedup) in PAPER.items()))
    shown = None
    for row in result["rounds"]:
        read = f"{row['candidates'] or 'all'} candidates of {row['vocabulary'] or 'all'} tokens"
        about = f"context {row['context']}, {read}; by its bytes {row['efficiency_bound_bytes']:.2f} at most"
        if about != shown:
            print(about)
            shown = about
        speedups = ", ".join(f"{value:.2f}" for value in row["projected_speedup"].values())
        modes, ms = f"{row['mode']:>14} + {row['target_mode']:<14}", row["ms"]
        print(
            f"  {modes} {ms['drafting']:8.2f} + {ms['verify']:.2f} ms  "
            f"{row['efficiency']:.2f} of {row['efficiency_bound']:.2f}  {speedups}"
        )
    print(f"{result['machine']['device']}, {result['seconds']:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="published")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens before the round; default: 1024 8192")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--compile-target", action="store_true", help="compile the target's passes too: takes minutes")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=0.25, help="of running for each time taken")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which nothing new is compiled")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    with torch.no_grad():
        result = run(arguments)
    report(result)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
