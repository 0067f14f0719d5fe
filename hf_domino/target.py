"""What a drafter asks of its target: token embeddings, base logits, chosen hidden states, and whether they fit.

Generation and training both ask here, so that they ask in the same way. The target is asked through its modules, never
through their weights: quantised, offloaded and tied ones then just work.
"""

import copy
import weakref

import torch
from torch import nn
from transformers.utils import logging, output_capturing

logger = logging.get_logger(__name__)

# Factors that a family's forward applies outside its embedding and head modules, by the name of the config field.
# (Gemma scales inside its embedding module, which needs nothing here.)
_EMBEDDING_MULTIPLIERS = ("embedding_multiplier", "embedding_scale")
# Other things it does there to the embeddings, by model type.
_EMBEDDING_STEPS = {
    "afmoe": lambda decoder, x: x * decoder.config.hidden_size**0.5 if decoder.config.mup_enabled else x,
    "bloom": lambda decoder, x: decoder.word_embeddings_layernorm(x),
    "nanochat": lambda decoder, x: decoder.norm(x),
}
# Fields that say how many hidden states per token go from layer to layer; a drafter reads one.
_STREAMS = ("altup_num_inputs", "hc_mult")
_LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")

# What `output_hidden_states=[...]` counts: layers before transformers 5.23, since then hidden states, embeddings first.
_COUNTS_EMBEDDINGS = hasattr(output_capturing, "resolve_hidden_states_indices")


# Of each output head, the rows that were gathered last.
_gathered_heads = weakref.WeakKeyDictionary()


def hidden_states_request(layer_ids) -> list[int]:
    """The value of `output_hidden_states` that makes a target return the outputs of these decoder layers only."""
    return [i + _COUNTS_EMBEDDINGS for i in layer_ids]


class Target:
    """A target model as its drafter sees it.

    Args:
        model: a decoder `PreTrainedModel` with an output head, image-text models included.
    """

    def __init__(self, model):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.embeddings = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        if self.embeddings is None or self.head is None:
            raise ValueError(f"{type(model).__name__} has no token embeddings or no output head to draft with.")
        for name in _STREAMS:
            if (getattr(self.config, name, None) or 1) > 1:
                raise ValueError(
                    f"The layers of {type(model).__name__} hand on several hidden states per token ({name}="
                    f"{getattr(self.config, name)}); a drafter reads one."
                )

    @property
    def device(self):
        """Where the target takes its inputs; None (leave them) where its weights are offloaded."""
        device = self.model.device
        return None if device.type == "meta" else device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the target's own layers see them, [...] -> [..., H], without any position information."""
        return self.enter(self.embeddings(token_ids.to(self.device)))

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What the target's forward makes of `inputs_embeds` in front of its layers, [..., H] -> [..., H]."""
        for factor in self._factors(_EMBEDDING_MULTIPLIERS):
            embeddings = embeddings * factor
        step = _EMBEDDING_STEPS.get(self.config.model_type)
        return step(self.model.get_decoder(), embeddings) if step else embeddings

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits for hidden vectors, [..., H] -> [..., V]: its head and what its forward does after it."""
        logits = self.head(hidden.to(self.device, self.model.dtype))
        for factor in self._factors(_LOGIT_MULTIPLIERS):
            logits = logits * factor
        for scaling in self._factors(("logits_scaling",)):
            logits = logits * scaling if self.config.model_type == "hyperclovax" else logits / scaling
        cap = getattr(self.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def restrict(self, token_ids: torch.Tensor) -> "Target":
        """This target with the base logits of some tokens only, [..., H] -> [..., len(token_ids)].

        The rows of a plain output head are gathered once, and again when its weights have changed; another kind of head
        computes all logits and drops the rest, which is said once.
        """
        restricted = copy.copy(self)
        head = self.head
        if type(head) is not nn.Linear or head.weight.is_meta:
            logger.warning_once(
                f"The rows of {type(self.model).__name__}'s output head ({type(head).__name__}) can't be gathered: it "
                "computes all logits in each round, whatever the draft vocabulary."
            )
            restricted.head = lambda hidden: (logits := head(hidden))[..., token_ids.to(logits.device)]
            return restricted
        weight, rows = head.weight, token_ids.to(head.weight.device)
        state = weight.data_ptr(), None if weight.is_inference() else weight._version, weight.dtype
        old_state, old_rows, gathered = _gathered_heads.get(head, (None, None, None))
        # What was gathered in inference mode is of no use to training.
        is_locked = gathered is not None and gathered.weight.is_inference() and not torch.is_inference_mode_enabled()
        if state != old_state or is_locked or not torch.equal(rows, old_rows):
            gathered = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
            gathered.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
            if head.bias is not None:
                gathered.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
            _gathered_heads[head] = state, rows, gathered
        restricted.head = gathered
        return restricted

    def _factors(self, names):
        values = (getattr(self.config, name, None) for name in names)
        return [value for value in values if value not in (None, 1)]

    def features(self, hidden_states, layer_ids) -> torch.Tensor:
        """Concatenated outputs of the chosen decoder layers.

        Args:
            hidden_states: transformers' tuple, each [B, T, target_hidden_size], the embeddings first or left out;
                entries of layers that were not chosen may be None. The last one is the final-normed state.
            layer_ids: zero-based decoder layers.

        Returns:
            [B, T, len(layer_ids) * target_hidden_size].
        """
        first = len(hidden_states) - self.config.num_hidden_layers
        states = [hidden_states[first + i] for i in layer_ids]
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)

    def check_pairing(self, config) -> None:
        """Raise one `ValueError` that names everything in which a [`DrafterConfig`] does not fit this target."""
        text = self.config
        width = getattr(text, "word_embed_proj_dim", None) or text.hidden_size
        pairs = [
            ("target_hidden_size", config.target_hidden_size, "hidden_size", text.hidden_size),
            ("hidden_size", config.hidden_size, "embedding width", width),
            ("vocab_size", config.vocab_size, "vocab_size", text.vocab_size),
        ]
        if config.num_target_layers is not None:
            pairs.append(("num_target_layers", config.num_target_layers, "num_hidden_layers", text.num_hidden_layers))
        problems = [f"{a} is {x}, the target's {b} is {y}" for a, x, b, y in pairs if x != y]
        depth, ids = text.num_hidden_layers, config.feature_layers(text.num_hidden_layers)
        if not 0 <= min(ids) <= max(ids) < depth:
            problems.append(f"target_layer_ids are {ids}, the target has layers 0 to {depth - 1}")
        elif width != text.hidden_size and depth - 1 in ids:
            problems.append(
                f"target_layer_ids are {ids}, the target's last layer, {depth - 1}, ends in vectors of {width} instead "
                f"of {text.hidden_size}"
            )
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        mask = getattr(config, "mask_token_id", None)  # not every kind of drafter has one
        if mask is not None and mask in (eos if isinstance(eos, list) else [eos]):
            problems.append(f"mask_token_id is {mask}, the target's eos_token_id is {eos}")
        if problems:
            raise ValueError(
                f"This drafter was not made for {type(self.model).__name__}: the drafter's "
                + "; its ".join(problems)
                + "."
            )
