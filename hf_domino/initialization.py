"""A drafter's first weights out of its target: copies of the target's own last layers.

One hidden state of the target passes through `fc` and the norm in front of the layers, so that the first layer reads
the context as it did in the target.
"""

import torch

from .configuration_domino import evenly_spread_layers

# Factors of some families that the drafter's layers don't have.
_SCALES = ("attention_multiplier", "residual_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping")


def fields_from_target(target, overrides: dict) -> dict:
    """Fields of a `DominoConfig` that let the drafter's layers be those of the target, `overrides` winning.

    Raises:
        ValueError: the target's layers are not of the Llama and Qwen kind, or there are too few.
    """
    decoder, text = _decoder(target), target.config.get_text_config(decoder=True)
    depth = len(decoder.layers)
    count = overrides.get("num_hidden_layers") or min(5, depth)
    if count > depth:
        raise ValueError(f"num_hidden_layers is {count}, but the target has {depth} layers to copy.")
    # Evenly spread features, the nearest one replaced by what the first copied layer reads.
    layer_ids, below = evenly_spread_layers(depth, count), max(0, depth - count - 1)
    layer_ids = sorted(set(layer_ids) - {_nearest(layer_ids, below)} | {below})
    attention = decoder.layers[-1].self_attn
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(_refusal(target, [f"they rotate only {rope['partial_rotary_factor']} of each head"]))
    fields = {
        "num_hidden_layers": count,
        "target_layer_ids": layer_ids,
        "use_qk_norm": hasattr(attention, "q_norm"),
        "attention_bias": attention.q_proj.bias is not None,
        "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None),
        "rope_parameters": {name: value for name, value in rope.items() if name != "partial_rotary_factor"},
    }
    return {name: value for name, value in fields.items() if value not in (None, {})} | overrides


def copy_from_target(drafter, target) -> None:
    """Copy the target's last layers and final norm into the drafter, and let `fc` pass one hidden state through.

    It is that of the layer under the first copied one, or of the nearest in `target_layer_ids`.

    Raises:
        ValueError: what doesn't fit.
    """
    config, decoder = drafter.config, _decoder(target)
    copied = decoder.layers[-config.num_hidden_layers :]
    problems = []
    if config.target_hidden_size != config.hidden_size:
        problems.append(f"they are {config.target_hidden_size} wide, the token embeddings {config.hidden_size}")
    for own, theirs in zip(drafter.layers, copied):
        problems += _misfits(own, theirs)
    text = target.config.get_text_config(decoder=True)
    head_scale = config.head_dim**-0.5
    if abs(getattr(copied[0].self_attn, "scaling", head_scale) - head_scale) > 1e-6:
        problems.append(f"they scale attention by {copied[0].self_attn.scaling}, not {head_scale}")
    problems += [f"they use {name}" for name in _SCALES[1:] if getattr(text, name, None) not in (None, 1)]
    if problems:
        raise ValueError(_refusal(target, problems))
    with torch.no_grad():
        for own, theirs in zip(drafter.layers, copied):
            weights = theirs.state_dict()
            for name, tensor in own.state_dict().items():
                tensor.copy_(weights[name]) if name in weights else tensor.zero_()
        drafter.hidden_norm.weight.copy_(copied[0].input_layernorm.weight)
        drafter.norm.weight.copy_(decoder.norm.weight)
        width, below = config.hidden_size, len(decoder.layers) - len(copied) - 1
        start = config.target_layer_ids.index(_nearest(config.target_layer_ids, below)) * width
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, start : start + width] = torch.eye(width)


def _decoder(target):
    decoder = target.get_decoder()
    layer = (getattr(decoder, "layers", None) or [None])[-1]
    names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    missing = [f"layers.{name}" for name in names if not hasattr(layer, name)]
    missing += [] if hasattr(decoder, "norm") else ["norm"]
    missing += [] if missing or hasattr(layer.self_attn, "q_proj") else ["layers.self_attn.q_proj"]
    if missing:
        raise ValueError(_refusal(target, [f"there is no {name}" for name in missing]))
    return decoder


def _misfits(own, theirs) -> list[str]:
    """What keeps a target's layer from being copied into a drafter's."""
    wanted, found = own.state_dict(), theirs.state_dict()
    # Some families have a bias on the queries, keys and values only.
    missing = [name for name in wanted if name not in found and name != "self_attn.o_proj.bias"]
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} has no place in a drafter's layer" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            problems.append(f"{name} is {tuple(found[name].shape)} but must be {tuple(wanted[name].shape)}")
        elif not found[name].is_floating_point():
            problems.append(f"{name} is quantised")
    if problems:
        return problems
    return [f"{name} computes something else" for name in ("input_layernorm", "mlp") if _differ(own, theirs, name)]


@torch.no_grad()
def _differ(own, theirs, name) -> bool:
    """Whether a module gives other outputs than the drafter's does with its weights."""
    theirs = getattr(theirs, name)
    weight = next(theirs.parameters())
    width = weight.shape[-1]
    x = torch.linspace(-1, 1, 2 * width, device=weight.device, dtype=weight.dtype).view(1, 2, width)
    mine = getattr(own, name)
    given = {key: value.to(weight) for key, value in theirs.state_dict().items()}
    expected = torch.func.functional_call(mine, given, (x,))
    return not torch.allclose(theirs(x).float(), expected.float(), rtol=0.05, atol=0.01)


def _nearest(layer_ids, wanted) -> int:
    return min(layer_ids, key=lambda i: abs(i - wanted))


def _refusal(target, problems) -> str:
    shown = "; ".join(dict.fromkeys(problems[:4]))
    return f"A drafter can't start from the layers of {type(target).__name__}: {shown}."
