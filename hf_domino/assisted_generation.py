"""Connecting generate() to our drafters: the only file that touches transformers' internals.

The draft-and-verify loop is transformers' own `_assisted_decoding`. Two methods of `GenerationMixin` are extended:
`_validate_generation_mode`, to refuse by name what can't be honoured before any work is done, and `_assisted_decoding`,
to give the loop a `Call` in place of the target. The loop then drafts with the drafter's own generator, and what stock
assisted decoding gets wrong beside the tokens themselves is put right where the loop asks the target for it: stops
inside a block, streaming, pre-filled caches, chunked prefill, padding, the returned scores and hidden states.
"""

import copy
import functools
import inspect
import logging
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import QuantizedLayer, StaticLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation import logits_process as builtin_processors

from .acceptance import record_round
from .generation_drafter import draft_length, is_adaptive
from .modeling_drafter import ContextCache
from .target import Target

logger = logging.getLogger(__name__)

# The seam: methods that are extended or called, with the parameters that they must have, and the calls that the loop
# must make for a Call to stand in for the target.
_SEAM = {
    "_validate_generation_mode": {"generation_mode", "generation_config", "generation_mode_kwargs"},
    "_assisted_decoding": {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "streamer"},
    "_prefill": {"input_ids", "generation_config", "model_kwargs"},
    "_get_candidate_generator": set(),
    "prepare_inputs_for_generation": {"next_sequence_length", "is_first_iteration"},
    "_update_model_kwargs_for_generation": {"outputs", "model_kwargs", "num_new_tokens"},
}
_LOOP_CALLS = {
    "_get_candidate_generator",
    "get_candidates",
    "prepare_inputs_for_generation",
    "model_kwargs_overrides",
    "_update_model_kwargs_for_generation",
    "crop",
}
_RETURNED = ("scores", "logits", "attentions", "hidden_states")
_CONTEXT = "_hf_domino_context"
# transformers renamed it between the supported versions.
_CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


# Connecting


def connect() -> None:
    """Let `generate(assistant_model=...)` take our drafters. Importing hf_domino does this; again changes nothing.

    Raises:
        ImportError: this transformers version has another generate() than the one hf_domino knows.
    """
    if (other := _connected_by()) is not None:
        # A copy of this file that came with a checkpoint never replaces one that is there; the package replaces it.
        if other == __name__ or not __name__.startswith("hf_domino."):
            return
        disconnect()
    _check_seam()
    for name, extended in (("_validate_generation_mode", _validate), ("_assisted_decoding", _decode)):
        original = getattr(GenerationMixin, name)

        def method(self, *args, _extended=extended, _original=original, **kwargs):
            return _extended(_original, self, *args, **kwargs)

        method = functools.wraps(original)(method)
        method.hf_domino_connected_by, method.hf_domino_original = __name__, original
        setattr(GenerationMixin, name, method)


def disconnect() -> None:
    """Undo [`connect`]: transformers' generate() is as it was."""
    for name in ("_validate_generation_mode", "_assisted_decoding"):
        original = getattr(getattr(GenerationMixin, name), "hf_domino_original", None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _connected_by() -> str | None:
    return getattr(GenerationMixin._assisted_decoding, "hf_domino_connected_by", None)


def _check_seam() -> None:
    version = Version(transformers.__version__)
    problems = []
    if not Version("5.17") <= version < Version("6.0.dev0"):
        problems.append("it is outside the supported range, 5.17 <= version < 6")
    for name, parameters in _SEAM.items():
        method = inspect.unwrap(getattr(GenerationMixin, name, None) or (lambda: None))
        if missing := parameters - set(inspect.signature(method).parameters):
            problems.append(f"GenerationMixin.{name} has no {', '.join(sorted(missing))}")
    loop = inspect.unwrap(getattr(GenerationMixin, "_assisted_decoding", None) or (lambda: None))
    if missing := _LOOP_CALLS - set(loop.__code__.co_names):
        problems.append(f"its assisted decoding does not use {', '.join(sorted(missing))}")
    if problems:
        raise ImportError(
            f"hf_domino can't connect to generate() of transformers {version}: {'; '.join(problems)}. "
            "Install a version that hf_domino supports: pip install 'transformers>=5.17,<6'."
        )


def is_drafter(model) -> bool:
    """Whether this brings its own generator, as a [`Drafter`] does, that of a checkpoint's own code as well."""
    return hasattr(model, "candidate_generator")


# Refusing by name


def _validate(original, target, generation_mode, generation_config, generation_mode_kwargs):
    drafter = generation_mode_kwargs.get("assistant_model")
    if not is_drafter(drafter):
        return original(target, generation_mode, generation_config, generation_mode_kwargs)
    try:
        if reason := _refusal(target, generation_mode, generation_config, generation_mode_kwargs):
            raise ValueError(f"A drafter can't be used here: {reason}.")
        draft_length(drafter.config, generation_config)
        is_adaptive(generation_config)
        Target(target).check_pairing(drafter.config)
        without_drafter = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        return original(target, generation_mode, generation_config, without_drafter)
    except Exception:
        # Whoever reads the stream in another thread must not wait for ever.
        if (streamer := generation_mode_kwargs.get("streamer")) is not None:
            streamer.end()
        raise


def _refusal(target, mode, config, mode_kwargs) -> str | None:
    """Why a setting can't be honoured; None if all can."""
    others = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    if (config.num_beams or 1) > 1:
        return f"num_beams={config.num_beams} (beam search); drafts are verified for one sequence only"
    if (config.num_return_sequences or 1) > 1:
        return f"num_return_sequences={config.num_return_sequences}; drafts are verified for one sequence only"
    if mode != GenerationMode.ASSISTED_GENERATION:
        return f"generation mode {getattr(mode, 'value', mode)!r}; only greedy search and sampling can be assisted"
    if getattr(config, "dola_layers", None) is not None:
        return f"dola_layers={config.dola_layers!r} (DoLa decoding)"
    if config.guidance_scale not in (None, 1):
        return f"guidance_scale={config.guidance_scale} (classifier-free guidance)"
    if config.assistant_ensemble_weight is not None:
        return f"assistant_ensemble_weight={config.assistant_ensemble_weight}, which would change the target's answer"
    for name in others:
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)} asks for another way of drafting"
    if config.use_cache is False:
        return "use_cache=False; verification needs the target's cache"
    if config.cache_implementation == "quantized":
        return "cache_implementation='quantized'; a quantised cache can't be rolled back"
    if target.config.is_encoder_decoder:
        return f"{type(target).__name__} is an encoder-decoder model"
    if getattr(target, "_is_stateful", False):
        return f"the recurrent state of {type(target).__name__} can't be rolled back"
    if _CACHE not in inspect.signature(type(target).forward).parameters or not target._supports_default_dynamic_cache():
        return f"{type(target).__name__} keeps no cache that can be rolled back"
    if any(parameter.is_meta for parameter in mode_kwargs["assistant_model"].parameters()):
        return "the drafter's weights are offloaded; it must be on one device as a whole"
    if mode_kwargs.get("synced_gpus"):
        return "synced_gpus=True (a target sharded by FSDP or ZeRO-3)"
    if mode_kwargs.get("assistant_tokenizer") is not None:
        return "assistant_tokenizer; the drafter uses the target's own tokens"
    return None


def _refuse_inputs(target, input_ids, logits_processor, cache) -> None:
    if input_ids.shape[0] != 1:
        raise ValueError(f"A drafter can't be used here: a batch of {input_ids.shape[0]} sequences; it must be 1.")
    for processor in logits_processor:
        if "ClassifierFreeGuidance" in type(processor).__name__:
            raise ValueError(f"A drafter can't be used here: {type(processor).__name__} (classifier-free guidance).")
    for layer in _layers(cache):
        if isinstance(layer, QuantizedLayer) or hasattr(layer, "recurrent_states") or not layer.is_croppable:
            raise ValueError(
                f"A drafter can't be used here: the {type(layer).__name__} in the cache of "
                f"{type(target).__name__} can't be rolled back."
            )


# Decoding


def _decode(original, target, input_ids, **kwargs):
    if not is_drafter(kwargs.get("assistant_model")):
        return original(target, input_ids, **kwargs)
    streamer = kwargs.pop("streamer", None)
    try:
        return Call(target, input_ids, streamer, **kwargs).run(original)
    finally:
        if streamer is not None:
            streamer.end()


class View:
    """A target with some of its methods replaced, for one call; nothing on the target itself is changed."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        return getattr(self.target, name)

    def __call__(self, **inputs):
        return self.target(**{**inputs, "return_dict": True})

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config):
        if generation_config.compile_config is not None:
            logger.warning("compile_config is not used with a drafter of hf_domino: the target runs uncompiled.")
        return False


class Prefill(View):
    """The target while it reads the prompt, whole or in chunks: collects the hidden states."""

    def __init__(self, target):
        super().__init__(target)
        self.chunks = []

    def __call__(self, **inputs):
        outputs = super().__call__(**inputs)
        self.chunks.append(outputs.hidden_states)
        return outputs

    def hidden_states(self) -> tuple:
        """transformers' tuple for all chunks together."""
        if len(self.chunks) == 1:
            return self.chunks[0]
        return tuple(None if states[0] is None else torch.cat(states, dim=1) for states in zip(*self.chunks))


class DeferredCrop:
    """Stands in for the cache while the loop crops it: how much must go is known after the stops were checked."""

    def __init__(self, cache):
        self.cache = cache
        self.pending = None

    @property
    def is_croppable(self):
        return self.cache.is_croppable

    def crop(self, amount):
        self.pending = -int(amount)

    def apply(self, surplus=0):
        if self.pending is not None:
            self.cache.crop(-(self.pending + surplus))
            self.pending = None


class Call(View):
    """One assisted generate() call: what transformers' loop sees in place of the target, and all state of the call.

    A round of the loop, in its order: `_get_candidate_generator` (once), the generator drafts,
    `prepare_inputs_for_generation`, `__call__` (the first one is the prefill), the processors, then acceptance,
    `DeferredCrop.crop`, `_update_model_kwargs_for_generation`, and at its end `stop`.
    """

    def __init__(
        self,
        target,
        input_ids,
        streamer,
        assistant_model,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        inputs_tensor=None,
        tokenizer=None,
        assistant_tokenizer=None,
        **model_kwargs,
    ):
        super().__init__(target)
        self.drafter, self.prompt, self.streamer = assistant_model, input_ids, streamer
        self.stopping_criteria, self.call_config, self.model_kwargs = stopping_criteria, generation_config, model_kwargs
        self.device = input_ids.device
        self.cache = model_kwargs.get(_CACHE)
        _refuse_inputs(target, input_ids, logits_processor, self.cache)

        on_drafts = LogitsProcessorList(p for p in logits_processor if _is_pure(p))
        self.generator = assistant_model.candidate_generator(target, generation_config, on_drafts)
        asked = generation_config.return_dict_in_generate
        self.returned = {
            name: [] for name in _RETURNED if asked and getattr(generation_config, f"output_{name}", False)
        }
        self.processor = RoundProcessor(logits_processor, generation_config.do_sample, "scores" in self.returned)
        if self.processor.in_order:
            self.generator.returns_logits = False
        self._continue_context()

        self.length = input_ids.shape[1]
        self.sequences = input_ids
        self.drafted = 0
        self.outputs = self.loop_kwargs = self.deferred = None
        self.is_verified = False
        # Sliding layers keep more than their window while they record, so that a rollback finds it.
        self.recorded_before = [layer for layer in _layers(self.cache) if getattr(layer, "record_past", False)]

    def run(self, loop):
        """Run transformers' loop on this call; returns what generate() returns."""
        config = copy.copy(self.call_config)
        config.return_dict_in_generate = False
        processors = LogitsProcessorList([self.processor] if self.processor.is_needed else [])
        try:
            loop(
                self,
                self.prompt,
                logits_processor=processors,
                stopping_criteria=self.stop,
                generation_config=config,
                assistant_model=self.drafter,
                **self.model_kwargs,
            )
        finally:
            if self.deferred is not None:
                self.deferred.apply()
            self._stop_recording()
        if self.call_config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False):
            self._keep_context()
        if not self.call_config.return_dict_in_generate:
            return self.sequences
        returned = {name: tuple(values) for name, values in self.returned.items()}
        return GenerateDecoderOnlyOutput(sequences=self.sequences, **returned, **{_CACHE: self.cache})

    # What the loop asks the target for

    def _get_candidate_generator(self, **kwargs):
        return self.generator

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, is_first_iteration=False, **kwargs):
        if is_first_iteration:
            return {}
        self.drafted = next_sequence_length - 1
        # The loop stretches these by the length of input_ids, which says nothing where the prompt came as embeddings or
        # behind a filled cache.
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if (value := self.loop_kwargs.get(name)) is not None:
                last = value[:, -1:] if name == "token_type_ids" else value.new_full((1, 1), name == "attention_mask")
                kwargs[name] = torch.cat([value, last.expand(-1, self.drafted)], dim=-1)
        return self.target.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=False, **kwargs
        )

    def __call__(self, **inputs):
        is_prefill = self.outputs is None
        self.processor.new_round()
        if is_prefill:
            hidden_states = self._prefill_prompt()
        else:
            inputs["output_hidden_states"] = self._wanted_hidden_states()
            self.outputs = super().__call__(**inputs)
            hidden_states = self.outputs.hidden_states
        if "logits" in self.returned:
            # The loop processes them in place.
            rows = self.outputs.logits[:, -self.drafted - 1 :]
            self.raw_logits = rows.to(self.device, torch.float32, copy=True)
        self.deferred = DeferredCrop(self.outputs[_CACHE])
        self.cache = self.outputs[_CACHE]
        self.hidden_states = hidden_states
        return SimpleNamespace(logits=self.outputs.logits, hidden_states=hidden_states, **{_CACHE: self.deferred})

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, num_new_tokens=1, **kwargs):
        # One token at a time where plain decoding does more than count.
        steps = [1] * num_new_tokens if model_kwargs.get("token_type_ids") is not None else [num_new_tokens]
        for step in steps:
            model_kwargs = self.target._update_model_kwargs_for_generation(
                self.outputs, model_kwargs, num_new_tokens=step, **kwargs
            )
        self.loop_kwargs = model_kwargs
        self.is_verified = True
        return model_kwargs

    def stop(self, input_ids, scores, **kwargs):
        """The call's stopping criteria, asked for each new token in turn as in plain decoding; the rest is dropped.

        Only here is a token out: kept, streamed and reported.
        """
        done = False
        if self.is_verified:
            first = self.length
            while self.length < input_ids.shape[1] and not done:
                self._keep(self.length - first)
                self.length += 1
                self.sequences = input_ids[:, : self.length]
                if self.streamer is not None:
                    self.streamer.put(self.sequences[:, -1].cpu())
                kept_scores = tuple(self.returned["scores"]) if "scores" in self.returned else None
                done = bool(self.stopping_criteria(self.sequences, kept_scores).all())
            self.kept = self.length - first
            self.deferred.apply(surplus=input_ids.shape[1] - self.length)
            if first > self.prompt.shape[1]:
                record_round(self.drafted, self.kept)
            self.is_verified = False
        # Some versions also ask before verification, about drafts that nobody has accepted yet.
        return torch.full((1,), done, device=input_ids.device)

    # The call's own state

    def _wanted_hidden_states(self):
        return (
            True if "hidden_states" in self.returned else self.generator.model_kwargs_overrides["output_hidden_states"]
        )

    def _prefill_prompt(self):
        prefill = Prefill(self.target)
        kwargs = {**self.model_kwargs, "output_hidden_states": self._wanted_hidden_states()}
        # A long prompt must not be kept whole in sliding layers: recording starts behind it.
        self._stop_recording()
        self.outputs = type(self.target)._prefill(prefill, self.prompt, self.call_config, kwargs)
        self.outputs[_CACHE].activate_past_recording()
        return prefill.hidden_states()

    def _stop_recording(self):
        for layer in _layers(self.cache):
            if hasattr(layer, "record_past"):
                layer.record_past = any(layer is before for before in self.recorded_before)

    def _keep(self, row):
        """Put what the target said about the row-th new token of this round among the returned values."""
        values, outputs = self.returned, self.outputs
        is_prefill = self.length == self.prompt.shape[1]
        if "logits" in values:
            values["logits"].append(self.raw_logits[:, row])
        if "scores" in values:
            values["scores"].append(self.processor.rows[row])
        if "hidden_states" in values:
            states = outputs.hidden_states
            values["hidden_states"].append(states if is_prefill else tuple(s[:, row : row + 1] for s in states))
        if "attentions" in values:
            weights = outputs.attentions
            values["attentions"].append(
                weights if is_prefill else tuple(self._attention_row(w, i, row) for i, w in enumerate(weights))
            )

    def _attention_row(self, weights, layer_idx, row):
        """The attention of one query of a block, [1, heads, 1, keys], over the keys that plain decoding returns."""
        layer = self.cache.layers[layer_idx]
        queries = weights.shape[-2]
        if isinstance(layer, StaticLayer):
            return weights[..., row : row + 1, :]
        end = weights.shape[-1] - queries + row + 1
        first = max(0, end - layer.sliding_window) if layer.is_sliding else 0
        return weights[..., row : row + 1, first:end]

    def _continue_context(self):
        """Go on with the drafter's context of an earlier turn where the cache brings it along."""
        kept = getattr(self.cache, _CONTEXT, None)
        if kept is not None and kept.drafter() is self.drafter and kept.length == self.cache.get_seq_length():
            self.generator.context, self.generator.new_features = kept.context, kept.features

    def _keep_context(self):
        """Leave the drafter's context with a cache that outlives the call, so that the next turn is drafted as well."""
        self.generator.observe_pass(self.hidden_states, self.loop_kwargs, self.kept, self.sequences)
        context, features, length = self.generator.context, self.generator.new_features, self.cache.get_seq_length()
        setattr(self.cache, _CONTEXT, KeptContext(weakref.ref(self.drafter), context, features, length))


@dataclass
class KeptContext:
    """A drafter's context, kept with the target's cache that it belongs to. It is copied with it, but not saved."""

    drafter: weakref.ref
    context: ContextCache
    features: list[torch.Tensor]
    length: int

    def __deepcopy__(self, memo):
        return KeptContext(self.drafter, *copy.deepcopy((self.context, self.features, self.length), memo))

    def __reduce__(self):
        return type(None), ()


class RoundProcessor(LogitsProcessor):
    """The call's processors on the rows of one verified block, in the order of the loop: row 0, 1, 2, ...

    Processors that transformers ships are functions of their arguments and run on every row. Others may count or
    remember: they see each emitted token's row exactly once and in order, as in plain decoding. For that the row's
    token is settled here, and rows behind the first rejected draft are not processed; in sampling the loop is handed
    the settled token as a point mass, to compare the draft with.
    """

    def __init__(self, processors, do_sample, keep_rows):
        self.processors, self.do_sample, self.keep_rows = processors, do_sample, keep_rows
        self.in_order = not all(_is_pure(processor) for processor in processors)
        self.is_needed = keep_rows or len(processors) > 0
        self.new_round()

    def new_round(self):
        self.rows, self.token = [], None

    def __call__(self, input_ids, scores):
        if self.in_order and self.rows and (self.token is None or int(input_ids[0, -1]) != self.token):
            self.token = None
            return scores
        scores = self.processors(input_ids, scores)
        if self.keep_rows or self.in_order:
            self.rows.append(scores.clone())
        if not self.in_order:
            return scores
        if not self.do_sample:
            self.token = int(scores.argmax(dim=-1))
            return scores
        self.token = int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
        return torch.full_like(scores, -float("inf")).index_fill_(
            1, torch.tensor([self.token], device=scores.device), 0.0
        )


def _is_pure(processor) -> bool:
    """Whether a processor is a function of its arguments alone, so that it may also see tokens that are rejected."""
    ships = type(processor).__module__ == builtin_processors.__name__
    return ships and not isinstance(processor, builtin_processors.SynthIDTextWatermarkLogitsProcessor)


def _layers(cache) -> list:
    return getattr(cache, "layers", [])
