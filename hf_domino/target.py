"""What a drafter asks of its target: token embeddings, base logits, chosen hidden states, and whether they fit.

Generation and training both ask here, so that they ask in the same way. The target is asked through its modules, never
through their weights: quantised, offloaded and tied ones then just work.
"""

import torch

# Factors that a family's forward applies outside its embedding and head modules, by the name of the config field.
# (Gemma scales inside its embedding module, which needs nothing here.)
_EMBEDDING_MULTIPLIERS = ("embedding_multiplier", "embedding_scale")
_LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


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

    @property
    def device(self):
        """Where the target takes its inputs; None (leave them) where its weights are offloaded."""
        device = self.model.device
        return None if device.type == "meta" else device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the target's own layers see them, [...] -> [..., H], without any position information."""
        embeddings = self.embeddings(token_ids.to(self.device))
        for factor in self._factors(_EMBEDDING_MULTIPLIERS):
            embeddings = embeddings * factor
        return embeddings

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits for hidden vectors, [..., H] -> [..., V]: its head and what its forward does after it."""
        logits = self.head(hidden.to(self.device, self.model.dtype))
        for factor in self._factors(_LOGIT_MULTIPLIERS):
            logits = logits * factor
        for scaling in self._factors(("logits_scaling",)):
            logits = logits * scaling if self.config.model_type == "hyperclovax" else logits / scaling
        cap = getattr(self.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def _factors(self, names):
        values = (getattr(self.config, name, None) for name in names)
        return [value for value in values if value not in (None, 1)]

    @staticmethod
    def features(hidden_states, layer_ids) -> torch.Tensor:
        """Concatenated outputs of the chosen decoder layers.

        Args:
            hidden_states: transformers' tuple, embeddings first, each [B, T, target_hidden_size]; entries of layers
                that were not chosen may be None. The last one is the final-normed state.
            layer_ids: zero-based decoder layers.

        Returns:
            [B, T, len(layer_ids) * target_hidden_size].
        """
        device = hidden_states[layer_ids[0] + 1].device
        return torch.cat([hidden_states[i + 1].to(device) for i in layer_ids], dim=-1)

    def check_pairing(self, config) -> None:
        """Raise one `ValueError` that names everything in which a `DominoConfig` does not fit this target."""
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
        if max(config.target_layer_ids) >= text.num_hidden_layers:
            problems.append(
                f"target_layer_ids are {config.target_layer_ids}, "
                f"the target has layers 0 to {text.num_hidden_layers - 1}"
            )
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        if config.mask_token_id in (eos if isinstance(eos, list) else [eos]):
            problems.append(f"mask_token_id is {config.mask_token_id}, the target's eos_token_id is {eos}")
        if problems:
            raise ValueError(
                f"This drafter was not made for {type(self.model).__name__}: the drafter's "
                + "; its ".join(problems)
                + "."
            )
