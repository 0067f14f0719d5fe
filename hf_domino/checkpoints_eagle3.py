"""Reading public EAGLE-3 checkpoints: those of the authors, SpecForge (SGLang), AngelSlim and speculators (vLLM)."""

from .checkpoints import Layout, collect, is_eagle3, one_less
from .configuration_drafter import abridged

# Where a field may stand beside the top level.
_SECTIONS = ("eagle_config", "transformer_layer_config")
# Our field -> its public names.
_PUBLIC_NAMES = {"draft_vocabulary_size": ("draft_vocab_size",)} | {
    name: (name,)
    for name in (
        "vocab_size target_layer_ids target_hidden_size norm_before_residual hidden_size intermediate_size "
        "num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act max_position_embeddings "
        "initializer_range rms_norm_eps rope_parameters rope_scaling rope_theta attention_bias attention_dropout "
        "use_qk_norm pad_token_id bos_token_id eos_token_id"
    ).split()
}
# Parts that some drafters of the family have and this one doesn't: norms of EAGLE-3.1, embeddings of its own.
_UNKNOWN_PARTS = ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad", "eagle_aux_layer_bands")
# Copies of the target's tensors, and the maps that say nothing where the draft vocabulary is the whole one.
_MAY_BE_UNUSED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d")


def fields_from_published_eagle3(config: dict) -> dict:
    """Fields of an `Eagle3Config` from the config.json of a public EAGLE-3 checkpoint.

    Raises:
        ValueError: it is none, a field stands in two places with different values, or it needs a part that this
            package doesn't have.
    """
    if not is_eagle3(config):
        kind = f"model_type {abridged(config.get('model_type'))}, architectures {abridged(config.get('architectures'))}"
        raise ValueError(f"This is not an EAGLE-3 drafter that hf_domino can read: its config.json is of {kind}.")
    if config.get("speculators_model_type") not in (None, "eagle3"):
        raise ValueError(
            f"This is a speculators checkpoint of type {abridged(config['speculators_model_type'])}, not 'eagle3'."
        )
    found = collect(config, _SECTIONS, _PUBLIC_NAMES, _UNKNOWN_PARTS, _layer_ids(config))
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError("This drafter reads the target's last hidden state only (use_aux_hidden_state is false).")
    if found.pop("num_hidden_layers", 1) != 1:
        raise ValueError("This drafter has more than one layer (num_hidden_layers), which hf_domino does not support.")
    # speculators builds its layer as in the model type that it names.
    if (config.get("transformer_layer_config") or {}).get("model_type") == "qwen3":
        found.setdefault("use_qk_norm", True)
    for name in ("rope_parameters", "rope_scaling"):
        # Over real tokens, one after the other, the three positions of an image-text model are the same.
        if isinstance(rope := found.get(name), dict) and "mrope_section" in rope:
            theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
            found[name] = {"rope_type": "default", **theta}
    return found


def _layer_ids(config) -> dict:
    """Place -> the target's layers that it names, zero-based by their outputs, of every place that names them."""
    section = config.get("eagle_config")
    places = {
        # SGLang, which adds one to say which layer they enter, SpecForge and NVIDIA count as we do.
        "eagle_config.eagle_aux_hidden_state_layer_ids": (section, "eagle_aux_hidden_state_layer_ids", False),
        # So does AngelSlim ...
        "aux_hidden_states_layer_ids": (config, "aux_hidden_states_layer_ids", False),
        # ... but at the top level vLLM's count is meant, also in its and in speculators' files: embeddings first.
        "eagle_aux_hidden_state_layer_ids - 1": (config, "eagle_aux_hidden_state_layer_ids", True),
    }
    found = {}
    for place, (where, name, counts_embeddings) in places.items():
        ids = where.get(name) if isinstance(where, dict) else None
        if isinstance(ids, list) and ids:  # some write an empty list for the usual ones
            found[place] = one_less(ids) if counts_embeddings else ids
    return found


LAYOUT = Layout(
    fields_from_published_eagle3,
    # speculators' and vLLM's name of the one layer.
    {r"^layers\.0\.": "midlayer."},
    may_be_unused=_MAY_BE_UNUSED,
    types={"d2t": "I64", "t2d": "BOOL"},
)
