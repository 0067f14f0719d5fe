"""Yardsticks on the same weights: transformers' own DFlash generator, and the published Domino loop."""

import torch
from transformers import DynamicCache, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from ..assisted_generation import _CACHE
from ..modeling_domino import ContextCache
from ..target import Target


def stock_dflash(drafter, target):
    """A drafter's backbone as the model that transformers' own `DFlashTokenCandidateGenerator` drafts with.

    `target.generate(..., assistant_model=stock_dflash(drafter, target), speculation_type="dflash")` is transformers'
    DFlash, without any code of hf_domino. It has no causal head, no shortlist and no draft vocabulary: those of the
    drafter are left out.

    Args:
        drafter ([`DominoDrafter`]): any whose block and layers that model can express.
        target (`PreTrainedModel`): its target, with an attention mask in the call.

    Returns:
        A `MuseGlimmerAssistantModel` in the target's dtype, on its device. It shares the drafter's tensors where those
        are there already.

    Raises:
        ValueError: that model or generator would compute something else; the message says what.
    """
    ours, config = Target(target), drafter.config
    ours.check_pairing(config)
    probe, name = torch.arange(config.vocab_size, device=ours.device)[:8], type(target).__name__
    is_scaled = hasattr(ours.embeddings, "embed_norm") or not torch.equal(ours.embed(probe), ours.embeddings(probe))
    problems = {
        "its blocks are sampled from the anchor's slot on, where transformers' drop it": config.sample_from_anchor,
        "it does not normalise queries and keys": not config.use_qk_norm,
        "its projections have biases": config.attention_bias,
        "its sliding layers look backwards only inside a block": "sliding_attention" in config.layer_types,
        "its blocks are causal": config.is_causal,
        "its features are of another width than its layers": config.target_hidden_size != config.hidden_size,
        f"{name} does more to its embeddings than its embedding module, which transformers leaves out": is_scaled,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise ValueError(f"transformers' DFlash can't express this drafter: {'; '.join(found)}.")
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "rope_parameters max_position_embeddings layer_types hidden_act block_size mask_token_id target_layer_ids"
    )
    stock_config = MuseGlimmerAssistantConfig(**{name: getattr(config, name) for name in same.split()})
    stock_config._attn_implementation = config._attn_implementation
    with torch.device("meta"):
        stock = MuseGlimmerAssistantModel(stock_config)
    stock.rotary_emb = type(stock.rotary_emb)(stock_config).to(target.device)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {names.get(name, name): tensor for name, tensor in drafter.state_dict().items()}
    stock.load_state_dict(
        {name: weights[name].to(target.device, target.dtype) for name in stock.state_dict()}, assign=True
    )
    return stock.eval()


@torch.no_grad()
def published_loop(target, drafter, input_ids, max_new_tokens, eos_token_ids=()):
    """Greedy decoding as Domino was published (paper, section 3): exact corrections, full output head, every slot.

    A plain loop around the drafter's modules, without generate(): all hidden states are asked for, each round drafts
    and verifies a whole block, and what lies behind a stop or the room is cut off at the end.

    Args:
        target (`PreTrainedModel`): a decoder.
        drafter ([`DominoDrafter`]): its drafter.
        input_ids: [1, T], a prompt without padding.
        max_new_tokens: room for the answer.
        eos_token_ids: token ids that end it.

    Returns:
        Token ids [1, T + new], and the tokens kept in each round, the target's own included.

    Raises:
        ValueError: drafter and target don't fit together.
    """
    ours, config = Target(target), drafter.config
    ours.check_pairing(config)
    cache, context, lengths = DynamicCache(config=target.config), ContextCache(config.num_hidden_layers), []
    end = input_ids.shape[1] + max_new_tokens
    stops = torch.tensor(list(eos_token_ids), dtype=torch.long, device=input_ids.device)

    def read(tokens, **kwargs):
        outputs = target(tokens, use_cache=True, output_hidden_states=True, **{_CACHE: cache}, **kwargs)
        return outputs.logits.argmax(dim=-1), ours.features(outputs.hidden_states, config.target_layer_ids)

    said, features = read(input_ids, logits_to_keep=1)
    cache.activate_past_recording()  # sliding layers keep what a rollback needs
    sequence = torch.cat([input_ids, said[:, -1:]], dim=-1)
    while sequence.shape[1] < end and not torch.isin(sequence[:, -1], stops).any():
        drafts = published_draft(ours, drafter, sequence[:, -1:], features, context)
        said, features = read(torch.cat([sequence[:, -1:], drafts], dim=-1))
        accepted = (drafts == said[:, :-1]).long().cumprod(dim=-1).sum().item()
        cache.crop(accepted - drafts.shape[1])
        features = features[:, : accepted + 1]
        kept = said[:, : min(accepted + 1, end - sequence.shape[1])]
        if (stopped := torch.isin(kept[0], stops).nonzero()).numel():
            kept = kept[:, : stopped[0, 0] + 1]
        sequence = torch.cat([sequence, kept], dim=-1)
        lengths.append(kept.shape[1])
    return sequence, lengths


def published_draft(target, drafter, anchor, features, context):
    """One block: anchor [1, 1], features [1, C, ...] new to the context -> drafted tokens [1, n]."""
    config = drafter.config
    masks = anchor.new_full((1, config.block_size - 1), config.mask_token_id)
    block = target.embed(torch.cat([anchor, masks], dim=-1))
    hidden = drafter(block, features.to(drafter.device), context)[:, config.first_draft_slot :]
    base = target.base_logits(hidden)
    if config.head == "none":
        return base.argmax(dim=-1)
    first = config.num_uncorrected_tokens
    drafts = base[:, :first].argmax(dim=-1)
    _, state = drafter.prefix_gru(target.embed(torch.cat([anchor, drafts], dim=-1)).to(hidden))
    for slot in range(first, hidden.shape[1]):
        if slot > first:
            _, state = drafter.prefix_gru(target.embed(drafts[:, -1:]).to(hidden), state)
        correction = drafter.embed_proj(torch.cat([hidden[:, slot], state[-1]], dim=-1))
        drafts = torch.cat([drafts, (base[:, slot] + correction.to(base)).argmax(dim=-1)[:, None]], dim=-1)
    return drafts
