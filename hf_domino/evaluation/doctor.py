"""Why is a drafter hardly ever accepted? Checks of the pair, a measurement, and the same weights under one change."""

import copy
import math
from collections import namedtuple
from dataclasses import dataclass, field

import torch
import transformers

from ..acceptance import Acceptance, track_acceptance
from ..configuration_domino import evenly_spread_layers
from ..target import Target
from ..training.data import ChatFormat, stop_ids
from ..training.features import compute_features
from ..training.walk import walk

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train goes 60 km in 45 minutes. How fast is that in km/h?",
    "Explain in two sentences why the sky is blue.",
]
LIKELY_CAUSES = """no neighbour is clearly better. The likely causes, in order:
    1. layer offset: target_layer_ids are zero-based decoder layers; some tools count the embeddings as number 0
    2. alignment: sample_from_anchor (shift_label) must be what the drafter was trained with
    3. rope: so must rope_parameters
    4. mask token: so must mask_token_id
    5. thinking mode: so must the chat template's enable_thinking
    6. another target, or a drafter that is not trained: what is left where no neighbour is better"""
NEAR_ONE = 1.3

# The same weights under one change, what that would mean, and the acceptance length on the same prompts.
Neighbour = namedtuple("Neighbour", "cause change acceptance")


@dataclass
class Finding:
    """One line of the report: with no `advice` (what to do about it) it is "ok", else worth a "look", or "wrong"."""

    subject: str
    text: str
    advice: str = ""
    verdict: str = "look"

    def __post_init__(self):
        self.verdict = self.verdict if self.advice else "ok"

    def __str__(self):
        return f"  {self.verdict:5}  {self.subject}: {self.text}" + (f"\n      -> {self.advice}" if self.advice else "")


@dataclass
class Diagnosis:
    """What [`diagnose`] found: the acceptance length, NaN where there is none, and the `better` of the `neighbours`."""

    findings: list[Finding]
    acceptance: float = math.nan
    by_prompt: list[float] = field(default_factory=list)
    neighbours: list[Neighbour] = field(default_factory=list)
    better: Neighbour | None = None

    @property
    def is_healthy(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def __str__(self):
        lines = [*self.findings, *["  The same weights on the same prompts, with one change:"] * bool(self.neighbours)]
        for one in self.neighbours:
            mark = "  <- clearly better" if one is self.better else ""
            lines.append(f"      {one.acceptance:5.2f}  {one.cause}: {one.change}{mark}")
        return "\n".join(map(str, lines))


def diagnose(
    target, drafter, tokenizer=None, prompts=PROMPTS, max_new_tokens=48, enable_thinking=None, probe_below=NEAR_ONE
) -> Diagnosis:
    """Check a pair, run it only if nothing is wrong, and try neighbours at an acceptance length under `probe_below`.

    Prompts are texts, lists of messages, or (all that works without the target's tokenizer) lists of token ids.
    """
    diagnosis = Diagnosis(check_models(target, drafter) + check_tokens(target, drafter, tokenizer, enable_thinking))
    if not diagnosis.is_healthy:
        return diagnosis
    encoded = encode(tokenizer, prompts, enable_thinking)
    try:
        tau, diagnosis.by_prompt, texts = measure(target, drafter, encoded, max_new_tokens)
    except Exception as error:  # whatever it is, it is the finding
        advice = "does target.generate() run without the drafter?"
        diagnosis.findings.append(Finding("generate()", f"{type(error).__name__}: {error}", advice, "wrong"))
        return diagnosis
    diagnosis.acceptance, by_prompt = tau, ", ".join(f"{one:.2f}" for one in diagnosis.by_prompt)
    text = f"{tau:.2f} tokens a round, of at most {drafter.config.num_draft_tokens + 1}; by prompt {by_prompt}"
    finding = Finding("acceptance", text, "no answer had room for a round" if math.isnan(tau) else "")
    diagnosis.findings.append(finding)
    if tau < probe_below:
        for cause, change, other, ids in neighbours(target, drafter, tokenizer, prompts, encoded):
            # The answers are the same ones unless the prompts have changed.
            is_same = ids is encoded
            new = replay(target, other, ids, texts) if is_same else measure(target, other, ids, max_new_tokens)[0]
            diagnosis.neighbours.append(Neighbour(cause, change, new))
        best = max(diagnosis.neighbours, key=lambda one: (one.acceptance > 0, one.acceptance))  # one may be NaN
        finding.verdict, finding.advice = "wrong" if tau < NEAR_ONE else "look", LIKELY_CAUSES
        if best.acceptance > max(tau + 0.3, 1 + 1.5 * (tau - 1)):  # no accident of a few rounds
            diagnosis.better, finding.verdict = best, "wrong"
            place = "the chat template" if best.cause == "thinking mode" else "the drafter's config.json"
            finding.advice = f"{best.cause}: with {best.change} in {place} it is {best.acceptance:.2f}, not {tau:.2f}"
    return diagnosis


def check_models(target, drafter) -> list[Finding]:
    """What the models and their configurations say of each other, without running anything."""
    config, text = drafter.config, target.config.get_text_config(decoder=True)
    is_connected = hasattr(transformers.GenerationMixin._assisted_decoding, "hf_domino_connected_by")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    findings = [Finding("versions", versions, "" if is_connected else "call hf_domino.connect()", "wrong")]
    if any(getattr(each, "return_dict", True) is False for each in (target.config, text)):
        findings.append(Finding("return_dict", "false in the target", "set target.config.return_dict = True", "wrong"))
    try:
        Target(target).check_pairing(config)
    except ValueError as error:
        return [*findings, Finding("pairing", str(error), "take the drafter made for this target", "wrong")]
    depth, ids, advice = text.num_hidden_layers, config.target_layer_ids, ""
    if len(ids) > 1 and ids == [i + 1 for i in evenly_spread_layers(depth, len(ids))]:
        advice = "all stand one above the usual choice: were the embeddings counted?"
    elif depth - 1 in ids:
        advice = "the last layer's output is taken behind the final norm: was it in the training?"
    findings.append(Finding("layers", f"{ids} of 0 to {depth - 1}, of width {text.hidden_size}", advice))
    for name, theirs, ours in (("dtype", target.dtype, drafter.dtype), ("device", target.device, drafter.device)):
        advice = "" if theirs == ours else f"works, with copies in every round: drafter.to(target.{name}) saves them"
        findings.append(Finding(name, f"{theirs}, the drafter's {ours}", advice))
    names, both = ("eos_token_id", "pad_token_id", "bos_token_id"), (target.config.get_text_config(), config)
    pairs = {name: [getattr(each, name, None) for each in both] for name in names}
    different = ", ".join(f"{name} {a} and {b}" for name, (a, b) in pairs.items() if a != b)
    return [*findings, Finding("special ids", different or "equal", different and "pipeline() wants them equal")]


def check_tokens(target, drafter, tokenizer, enable_thinking=None) -> list[Finding]:
    """Mask token, tokenizer and chat template."""
    if tokenizer is None:
        return [Finding("tokenizer", "none", "mask token and chat template were not looked at")]
    mask, size = drafter.config.mask_token_id, target.config.get_text_config(decoder=True).vocab_size
    tokens, template = {i: token for token, i in tokenizer.get_vocab().items()}, tokenizer.chat_template
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    is_spare = mask not in tokens or (mask in special and tokens[mask] not in str(template))
    advice = "" if is_spare else "texts may contain it, and the target may emit it: was it so in the training?"
    findings = [Finding("mask token", f"{mask}, {tokens.get(mask, 'no token of the tokenizer')}", advice)]
    advice = "" if max(tokens) < size else f"the target has {size} tokens only: is it another model's?"
    try:
        stop_ids(target, tokenizer)
    except ValueError as error:
        advice = advice or str(error)
    findings.append(Finding("tokenizer", f"ids up to {max(tokens)}", advice))
    if not template:
        return [*findings, Finding("chat template", "none", "was the drafter trained on plain text? Prompts are here")]
    if not ChatFormat(tokenizer, enable_thinking).knows_thinking():
        return [*findings, Finding("chat template", "there, without thinking modes")]
    advice = "a drafter is accepted much less in a mode that it was not trained in: compare both"
    return [*findings, Finding("chat template", f"there, enable_thinking {enable_thinking}", advice)]


def neighbours(target, drafter, tokenizer, prompts, encoded):
    """Yield (cause, change, drafter, token ids) of everything worth trying, the likeliest first."""
    config, text = drafter.config, target.config.get_text_config(decoder=True)
    ids, own_rope, rope = config.target_layer_ids, config.rope_parameters, getattr(text, "rope_parameters", None) or {}
    thetas = [(rope.get("full_attention") or rope).get("rope_theta"), 1e4, 1e6]
    masks = [getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk")] + [text.vocab_size - 1]
    masks += [] if tokenizer is None else [max(tokenizer.get_vocab().values()) + 1]  # the first row of padding
    changes = [("layer offset", "target_layer_ids", [i + step for i in ids]) for step in (-1, 1)]
    changes += [("layer order", "target_layer_ids", ids[::-1])]
    changes += [("alignment", "sample_from_anchor", not config.sample_from_anchor)]
    changes += [("rope", "rope_parameters", {**own_rope, "rope_theta": theta}) for theta in thetas if theta]
    changes += [("rope", "rope_parameters", {"rope_type": "default", "rope_theta": own_rope["rope_theta"]})]
    changes += [("mask token", "mask_token_id", mask) for mask in masks if mask is not None]
    changes += [("attention", "is_causal", not config.is_causal), ("correction", "head", "none")]
    for number, (cause, name, value) in enumerate(changes):
        if value != getattr(config, name) and changes.index((cause, name, value)) == number:
            try:
                other = with_setting(drafter, name, value)
                Target(target).check_pairing(other.config)
            except ValueError:  # no such layer or token
                continue
            yield cause, f"{name} = {value}", other, encoded
    if getattr(tokenizer, "chat_template", None) and ChatFormat(tokenizer).knows_thinking():
        for mode in (True, False):
            if (other_ids := encode(tokenizer, prompts, mode)) != encoded:
                yield "thinking mode", f"enable_thinking = {mode}", drafter, other_ids


def with_setting(drafter, name, value):
    """The same modules under a configuration with one other value; the drafter itself stays as it is."""
    neighbour = copy.copy(drafter)
    neighbour.config = type(drafter.config).from_dict({**drafter.config.to_dict(), name: value})
    neighbour.config._attn_implementation = drafter.config._attn_implementation
    neighbour._modules = dict(drafter._modules)
    neighbour.rotary_emb = type(drafter.rotary_emb)(neighbour.config).to(drafter.device)
    return neighbour


def encode(tokenizer, prompts, enable_thinking=None) -> list[list[int]]:
    """Token ids of texts and of lists of messages, in the chat template where there is one; ids stay as they are."""
    encoded = []
    for prompt in prompts:
        ids = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(ids[0], dict) and tokenizer.chat_template:
            ids = ChatFormat(tokenizer, enable_thinking).context_ids(ids)
        elif isinstance(ids[0], dict):
            ids = tokenizer("\n".join(message["content"] for message in ids))["input_ids"]
        encoded.append(ids)
    return encoded


def measure(target, drafter, encoded, max_new_tokens) -> tuple[float, list[float], list[torch.Tensor]]:
    """Acceptance length of generate() over all rounds, that of each prompt, and prompts with answers, [1, T] each."""
    pooled, by_prompt, texts = Acceptance(), [], []
    for ids in encoded:
        inputs = torch.tensor([ids], device=Target(target).device)
        kwargs = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": max_new_tokens, "do_sample": False}
        with track_acceptance() as acceptance:
            texts.append(target.generate(inputs, assistant_model=drafter, return_dict_in_generate=False, **kwargs))
        by_prompt.append(drop_cut_round(acceptance).mean)
        pooled.lengths += acceptance.lengths
    return pooled.mean, by_prompt, texts


@torch.no_grad()
def replay(target, drafter, encoded, texts) -> float:
    """The acceptance length that generate() would have on answers that are known, without the target's passes."""
    pooled = Acceptance()
    for ids, text in zip(encoded, texts):
        everything = torch.ones_like(text)
        answer = (everything.cumsum(-1) > len(ids)).long()
        features = compute_features(Target(target), text, everything, drafter.config.target_layer_ids)[0]
        pooled.lengths += drop_cut_round(walk(drafter, Target(target), text, answer, features)).lengths
    return pooled.mean


def drop_cut_round(acceptance):
    """Leave out rounds without a draft and, unless it is alone, the last one: a stop or the room has cut it."""
    lengths = [kept for kept, drafted in zip(acceptance.lengths, acceptance.drafted) if drafted]
    acceptance.lengths = lengths[:-1] or lengths
    return acceptance
