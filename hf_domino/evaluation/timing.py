"""Reading the clock around devices, target passes and the parts of a round."""

import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from transformers import DynamicCache

from ..assisted_generation import _CACHE
from .oracle import GENERATORS

DRAFTING_PARTS = {
    "features": "observe_pass",
    "backbone": "backbone",
    "output head": "base_logits",
    "correction": "correct",
}


def now(device) -> float:
    """Seconds on a clock that only goes forward, once everything queued on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass
class Pass:
    """One forward pass of the target: tokens in its cache before, tokens read, and seconds where they were taken."""

    past: int
    width: int
    cache: str
    seconds: float | None = None


@contextmanager
def watch_passes(target, every: bool = False):
    """Collects a [`Pass`] for each forward pass of a target, whoever asks for it.

    The first one, which reads the prompt, is timed; with `every` all are, which holds a device up in each round.
    """
    passes, started = [], []

    def before(module, args, kwargs):
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        cache = kwargs.get(_CACHE)
        past = 0 if cache is None else int(cache.get_seq_length())
        passes.append(Pass(past, tokens.shape[1], type(cache).__name__))
        if every or len(passes) == 1:
            started.append(now(target.device))

    def after(module, args, kwargs, outputs):
        if every or len(passes) == 1:
            passes[-1].seconds = now(target.device) - started.pop()

    hooks = [
        target.register_forward_pre_hook(before, with_kwargs=True),
        target.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def rounds_of(passes: list[Pass], length: int) -> tuple[list[int], list[int]]:
    """Tokens kept and tokens drafted in each round, seen from the target's cache alone: valid for every method.

    Args:
        passes: of one call, the pass over the prompt first; that one is no round.
        length: of what the call returned, prompt included.
    """
    # The newest token is never in the cache.
    ends = [one.past for one in passes[1:]] + [length - 1]
    kept = [end - start for start, end in zip(ends, ends[1:])]
    return kept, [one.width - 1 for one in passes[1:]]


@contextmanager
def timed_parts(device):
    """Collects seconds for every call of each part of drafting with our own generator."""
    seconds = defaultdict(list)

    def timed(name, method):
        def call(*args, **kwargs):
            start = now(device)
            result = method(*args, **kwargs)
            seconds[name].append(now(device) - start)
            return result

        return call

    with ExitStack() as patches:
        for kind in GENERATORS:
            for name, method in DRAFTING_PARTS.items():
                if hasattr(kind, method):
                    patches.enter_context(mock.patch.object(kind, method, timed(name, getattr(kind, method))))
        yield seconds


@torch.no_grad()
def own_pass(target, context: int, num_tokens: int, repeats: int = 7) -> float:
    """Median seconds of the target's own forward pass over `num_tokens` tokens behind a context of that many tokens."""
    device = target.device
    cache = DynamicCache(config=target.config)
    target(torch.ones(1, context, dtype=torch.long, device=device), use_cache=True, **{_CACHE: cache})
    cache.activate_past_recording()
    ids, times = torch.ones(1, num_tokens, dtype=torch.long, device=device), []
    for _ in range(repeats + 1):
        start = now(device)
        target(ids, use_cache=True, **{_CACHE: cache})
        times.append(now(device) - start)
        cache.crop(-num_tokens)
    return statistics.median(times[1:])
