"""DraftGenerator: what every kind of drafter does in a round of transformers' assisted generation."""

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from .draft_schedule import DraftSchedule, largest_probabilities
from .target import Target, hidden_states_request


class DraftGenerator(CandidateGenerator):
    """Drafts tokens in every round from the hidden states of the target's last forward pass.

    It speaks transformers' protocol for generators that need the target's outputs: `requires_model_outputs`, and
    `model_kwargs_overrides`, which asks the target for the chosen hidden states only. One generator serves one
    `generate()` call and holds all of its state. A kind of drafter adds its `context` and [`draft`].

    Args:
        drafter ([`Drafter`]): The drafter.
        target (`PreTrainedModel`): The target model.
        generation_config (`GenerationConfig`): The call's configuration, with `max_length` resolved.
        logits_processor (`LogitsProcessorList`, *optional*): Processors that act on the drafts' logits too.

    Raises:
        ValueError: drafter and target don't fit together, or `num_assistant_tokens` is out of range, or
            `num_assistant_tokens_schedule` is none of ours.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target, generation_config, logits_processor=None):
        self.drafter = drafter
        self.config = drafter.config
        self.target = Target(target)
        self.target.check_pairing(self.config)
        self.layer_ids = self.config.feature_layers(self.target.config.num_hidden_layers)
        self.model_kwargs_overrides = {"output_hidden_states": hidden_states_request(self.layer_ids)}
        self.num_draft_tokens = draft_length(self.config, generation_config)
        self.schedule = DraftSchedule() if is_adaptive(generation_config) else None
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        # Greedy verification compares tokens; rejection sampling needs the distribution that the drafts came from.
        self.returns_logits = self.do_sample
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.vocabulary = drafter.draft_vocabulary
        if self.vocabulary is not None:
            self.vocabulary = self.vocabulary.to(self.target.device)
        self.new_features = []
        self.has_read_prompt = False

    def observe_pass(self, hidden_states, model_kwargs, num_verified, input_ids) -> None:
        """Take the features of the verified tokens out of a target pass; the first one is that over the prompt.

        Args:
            hidden_states: transformers' tuple, see [`Target.features`].
            model_kwargs: the loop's, one token ahead of the pass; its attention mask tells padding from prompt.
            num_verified: token rows at the front that are verified; all rows of the prompt are.
            input_ids: [1, T], the tokens of these rows and the anchor behind them; not those of an embedded prompt.
        """
        features, real = self.target.features(hidden_states, self.layer_ids), slice(None)
        if self.has_read_prompt:
            features = features[:, :num_verified]
        elif (mask := model_kwargs.get("attention_mask")) is not None:
            # The drafter counts real tokens: rows of padding are left out.
            real = mask[0, -features.shape[1] - 1 : -1] != 0
        self.has_read_prompt = True
        rows = self.context_rows(features, real, model_kwargs, input_ids)
        self.new_features.append(rows.to(self.drafter.device, self.drafter.dtype))

    def context_rows(self, features, real, model_kwargs, input_ids) -> torch.Tensor:
        """What the drafter reads of verified tokens: [1, T, F] features, of which it takes the `real` ones."""
        return features[:, real]

    @torch.no_grad()
    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=0, **kwargs
    ):
        """Draft the tokens that may follow.

        Args:
            input_ids: [1, T], verified tokens; the last one is the anchor, which the target has not seen yet.
            model_kwargs: the loop's; its attention mask tells padding from prompt.
            model_outputs: outputs of the target's last pass, with hidden states.
            is_first_iteration: nothing can be drafted before the target has read the prompt.
            n_last_matches: drafts accepted in that pass; its first `n_last_matches + 1` token rows are verified.

        Returns:
            Token ids [1, T + n], and where verification needs them the float32 logits [1, n, V] that the drafts were
            chosen from, else None.
        """
        if is_first_iteration:
            return input_ids, None
        self.observe_pass(model_outputs.hidden_states, model_kwargs or {}, int(n_last_matches) + 1, input_ids)
        # One place of the room that is left belongs to the target's own token.
        count = min(self.num_draft_tokens, self.max_length - input_ids.shape[1] - 1)
        if self.schedule is None:
            tokens, logits = self.draft(input_ids, count) if count > 0 else (None, None)
        else:
            tokens, logits = self.draft_what_pays(input_ids, count, int(n_last_matches))
        if tokens is None:
            return input_ids, None
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=-1), logits if self.returns_logits else None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Part of transformers' protocol; how rounds went is learnt from `n_last_matches`."""

    def draft_what_pays(self, input_ids, count, num_matches) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A round of the adaptive schedule: as [`draft`], of at most `count` tokens, or (None, None)."""
        confidence, drafts = None, (None, None)
        if self.schedule.begin(num_matches) and count > 0:
            tokens, logits = self.draft(input_ids, count)
            confidence = largest_probabilities(self.chosen_from)[:count]
            confidence = confidence[: self.schedule.cut(confidence)]
            if confidence:
                drafts = tokens[:, : len(confidence)], logits[:, : len(confidence)] if self.returns_logits else None
        self.schedule.end(confidence)
        return drafts

    def draft(self, input_ids, count) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One round: `count` tokens that may follow `input_ids` [1, T].

        Sets `chosen_from`, the logits of each draft or of all, [n, V] each. Returns tokens [1, count], and where
        verification needs them the logits they were chosen from, [1, count, V].
        """
        raise NotImplementedError

    def choose(self, logits, columns=None, prefix=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick a token for each row of logits as the target would: processed, then sampled or the largest.

        Args:
            logits: [n, K], of all tokens or of some.
            columns: [n, K], which of the base logits they are; None for all.
            prefix: [n, T], the tokens before, where there are processors.

        Returns:
            Tokens [n] and the logits they were chosen from: [n, V] where a processor or verification needs them.
        """
        token_ids = columns
        if self.vocabulary is not None:
            token_ids = self.vocabulary.expand(len(logits), -1) if columns is None else self.vocabulary[columns]
        if token_ids is not None and (self.logits_processor or self.returns_logits):
            everywhere = logits.new_full((len(logits), self.config.vocab_size), -float("inf"))
            logits, token_ids = everywhere.scatter(1, token_ids, logits), None
        if self.logits_processor:
            logits = self.logits_processor(prefix, logits)
            # Where nothing that may be drafted is allowed, any draft will do: it is rejected.
            logits = logits.masked_fill(logits.isneginf().all(dim=-1, keepdim=True), 0.0)
        picks = logits.softmax(dim=-1).multinomial(1) if self.do_sample else logits.argmax(dim=-1, keepdim=True)
        return (picks if token_ids is None else token_ids.gather(1, picks))[:, 0], logits


def draft_length(config, generation_config) -> int:
    """Tokens to draft in a round: `num_assistant_tokens` where it is given, at most the drafter's `max_draft_tokens`.

    Raises:
        ValueError: `num_assistant_tokens` is out of range.
    """
    asked = generation_config.num_assistant_tokens
    # generate() fills in transformers' own default, which is as good as nothing: it was not chosen for this drafter.
    if asked in (None, GenerationConfig._get_default_generation_params()["num_assistant_tokens"]):
        return config.num_draft_tokens
    if not 1 <= asked <= config.max_draft_tokens:
        raise ValueError(
            f"num_assistant_tokens must be from 1 to {config.max_draft_tokens}, the most that this drafter drafts in a "
            f"round, but is {asked}."
        )
    return asked


def is_adaptive(generation_config) -> bool:
    """Whether the call asks for [`DraftSchedule`], with `num_assistant_tokens_schedule="adaptive"`.

    Raises:
        ValueError: it asks for a schedule of transformers' own assistants.
    """
    schedule = generation_config.num_assistant_tokens_schedule
    if schedule not in (None, "constant", "adaptive"):
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} is for transformers' own assistants; with this "
            'drafter it is "constant" or "adaptive".'
        )
    return schedule == "adaptive"
