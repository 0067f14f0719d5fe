"""The ways of decoding that are measured against each other, each made ready for one target."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..modeling_domino import DominoDrafter
from ..modeling_drafter import Drafter
from ..modeling_eagle3 import Eagle3Drafter
from ..target import Target

# The methods, and which of the models each can be given.
METHODS = {
    "plain": (),
    "domino": ("drafter",),
    "domino-adaptive": ("drafter",),
    "domino-base": ("drafter",),
    "published-loop": ("drafter",),
    "dflash": ("dflash",),
    "stock-dflash": ("dflash", "drafter"),
    "eagle3": ("eagle3",),
    "assistant": ("assistant",),
    "prompt-lookup": (),
}
OURS = ("domino", "domino-adaptive", "domino-base", "dflash", "eagle3")


@dataclass
class Method:
    """A way of decoding: `run(inputs, settings)` returns token ids [1, T], prompt included."""

    name: str
    run: Callable
    drafter: Drafter | None = None  # where our own generator drafts


def chosen_methods(options) -> list[str]:
    """The methods asked for, or all that the models given allow; plain first.

    Raises:
        ValueError: a method is unknown, or a model that it needs is missing.
    """
    possible = [
        name
        for name, needs in METHODS.items()
        if not needs or any(getattr(options, need) is not None for need in needs)
    ]
    for name in options.methods or ():
        if name not in METHODS:
            raise ValueError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
        if name not in possible:
            raise ValueError(f"The method {name} needs --{' or --'.join(METHODS[name])}.")
    return [name for name in possible if not options.methods or name in options.methods]


def build_methods(names, options, target, tokenizer) -> tuple[list[Method], dict[str, str]]:
    """The methods, and for those that can't be had here the reason."""

    def load(kind, name, **kwargs):
        return kind.from_pretrained(name, dtype=target.dtype, **kwargs).to(target.device).eval()

    @functools.cache  # methods on the same weights share them
    def load_drafter(option, **kwargs):
        kind = Eagle3Drafter if option == "eagle3" else DominoDrafter
        drafter = load(kind, getattr(options, option), **kwargs)
        Target(target).check_pairing(drafter.config)
        if option == "dflash" and drafter.config.head != "none":
            raise ValueError(f"{options.dflash} is a Domino drafter: give it as --drafter.")
        if option == "drafter" and not kwargs and drafter.config.head == "none":
            raise ValueError(f"{options.drafter} is a DFlash drafter: give it as --dflash.")
        return drafter

    def generate(**extra):
        return lambda inputs, settings: target.generate(**inputs, **settings, **extra)

    def build(name) -> Method:
        if name == "plain":
            return Method(name, generate())
        if name == "prompt-lookup":
            return Method(name, generate(prompt_lookup_num_tokens=10))
        if name == "assistant":
            extra, other = {}, AutoTokenizer.from_pretrained(options.assistant)
            if other.get_vocab() != tokenizer.get_vocab():
                extra = {"tokenizer": tokenizer, "assistant_tokenizer": other}
            return Method(name, generate(assistant_model=load(AutoModelForCausalLM, options.assistant), **extra))
        if name in OURS:
            drafter = load_drafter(METHODS[name][0], **({"head": "none"} if name == "domino-base" else {}))
            schedule = {"num_assistant_tokens_schedule": "adaptive"} if name == "domino-adaptive" else {}
            return Method(name, generate(assistant_model=drafter, **schedule), drafter)
        from .peers import published_loop, stock_dflash

        if name == "stock-dflash":
            drafter = load_drafter("dflash") if options.dflash else load_drafter("drafter", head="none")
            stock = stock_dflash(drafter, target)
            return Method(name, generate(assistant_model=stock, speculation_type="dflash"))
        if options.do_sample:
            raise Unavailable("the published loop is greedy here")
        drafter = load_drafter("drafter")

        def loop(inputs, settings):
            budget, stops = settings["max_new_tokens"], settings["eos_token_id"]
            return published_loop(target, drafter, inputs["input_ids"], budget, stops)[0]

        return Method(name, loop)

    methods, skipped = [], {}
    for name in names:
        try:
            methods.append(build(name))
        except (ImportError, ValueError) as error:
            # A peer may be missing, what is to be measured may not.
            if name not in ("stock-dflash", "published-loop"):
                raise
            skipped[name] = str(error)
    return methods, skipped


class Unavailable(ValueError):
    """A method can't be had under these options."""
