"""DominoDrafter: the backbone and the head compute what the paper says, and a saved drafter comes back as it was."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, CohereConfig, GlmConfig, LlamaConfig, Qwen3Config, Qwen3Model

import hf_domino
from hf_domino import DominoConfig, DominoDrafter
from hf_domino.modeling_domino import ContextCache, visible
from tests.tiny import VOCAB, inputs, tiny_drafter, tiny_eagle3, tiny_target

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
BOTH_SLIDING = dict(layer_types=["sliding_attention"] * 2, sliding_window=10)
KINDS = [{}, SLIDING, BOTH_SLIDING, {**SLIDING, "is_causal": False}, {**SLIDING, "is_causal": True}]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


def block(drafter, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, drafter.config.block_size, drafter.config.hidden_size, generator=generator)


def features(drafter, count, batch=1, seed=1):
    return torch.randn(batch, count, drafter.fc.in_features, generator=torch.Generator().manual_seed(seed))


def sharp(drafter):
    """The drafter with random norms and large weights, so that nothing hides behind ones and near-uniform attention."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if weight.dim() > 1 else 1))
    return drafter


@contextmanager
def poisoned_memory():
    """Uninitialised memory is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Saving and loading


def tensor_names(num_layers, has_head):
    parts = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm "
        "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"
    ).split()
    names = {f"layers.{i}.{part}.weight" for i in range(num_layers) for part in parts}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    head = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
    return names | head if has_head else names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shard_size", "is_sharded"), [("1GB", False), ("20KB", True)])
def test_round_trip_is_bit_for_bit(tmp_path, target, dtype, shard_size, is_sharded):
    drafter = sharp(tiny_drafter(target)).to(dtype)
    drafter.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = {file.name for file in tmp_path.iterdir() if file.suffix != ".py"}
    weights = {name for name in files if name.endswith(".safetensors")}
    assert (len(weights) > 1) == is_sharded
    assert files - weights == {"config.json"} | ({"model.safetensors.index.json"} if is_sharded else set())
    for loaded in (DominoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is DominoDrafter
        assert loaded.dtype == dtype
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, drafter.state_dict()[name]), name


@pytest.mark.parametrize("head", ["domino", "none"])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_file_has_the_public_tensor_names_and_nothing_of_the_target(tmp_path, target, head, tie_word_embeddings):
    drafter = tiny_drafter(target, head=head, tie_word_embeddings=tie_word_embeddings)
    drafter.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensor_names(2, head == "domino")
    _, info = DominoDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())


def test_auto_classes_need_no_remote_code(tmp_path, drafter):
    drafter.save_pretrained(tmp_path)
    (tmp_path / "modeling_domino.py").write_text("raise SystemExit('this file was run')")
    assert type(AutoConfig.from_pretrained(tmp_path)) is DominoConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is DominoDrafter
    assert type(AutoModel.from_config(drafter.config)) is DominoDrafter


REMOTE = """
import sys

target_folder, package, *folders = sys.argv[1:]


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_domino":
            raise ModuleNotFoundError(name)


hide = Hide()
sys.meta_path.insert(0, hide)
try:
    import hf_domino
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("hf_domino is there")

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin

target = AutoModelForCausalLM.from_pretrained(target_folder)
drafters = [AutoModel.from_pretrained(folder, trust_remote_code=True) for folder in folders]
ids = torch.arange(1, 8)[None]
kwargs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
plain = target.generate(**kwargs)
for drafter in drafters:
    assert type(drafter).__module__.startswith("transformers_modules.")
    rounds = []
    drafter.register_forward_hook(lambda *_: rounds.append(1))
    assert torch.equal(target.generate(**kwargs, assistant_model=drafter), plain)
    assert rounds
own = GenerationMixin._assisted_decoding.hf_domino_connected_by
assert own.startswith("transformers_modules."), own

sys.meta_path.remove(hide)
sys.path.insert(0, package)
import hf_domino

assert GenerationMixin._assisted_decoding.hf_domino_connected_by == "hf_domino.assisted_generation"
for drafter, folder in zip(drafters, folders):
    with hf_domino.track_acceptance() as acceptance:
        assert torch.equal(target.generate(**kwargs, assistant_model=drafter), plain)
    assert sum(acceptance.lengths) == 19, acceptance.lengths
    again = AutoModel.from_pretrained(folder)
    assert type(again) is getattr(hf_domino, type(drafter).__name__)
    assert torch.equal(target.generate(**kwargs, assistant_model=again), plain)
hf_domino.disconnect()
assert not hasattr(GenerationMixin._assisted_decoding, "hf_domino_connected_by")
"""


@pytest.mark.parametrize("names", [("domino", "eagle3"), ("eagle3", "domino")], ids=lambda names: f"{names[0]} first")
def test_saved_folders_work_without_the_package(tmp_path, target, drafter, names):
    """Each brings its own copy of the code, and the one that was loaded first connects generate() for both."""
    for name in names:
        (drafter if name == "domino" else tiny_eagle3(target)).save_pretrained(tmp_path / name)
    target.save_pretrained(tmp_path / "target")
    package = str(Path(hf_domino.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(tmp_path / "target"), package, *(str(tmp_path / name) for name in names)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# Initialisation


@torch.no_grad()
def assert_initialised(drafter):
    """Every tensor has the values of our rule."""
    config = drafter.config
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        elif name.startswith("prefix_gru"):
            bound = config.causal_state_size**-0.5
            assert 0.9 * bound < weight.abs().max() <= bound, name
            assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.1), name
        elif name == "embed_proj.2.weight":
            assert not weight.any()
        elif name.endswith("bias"):
            assert not weight.any(), name
        else:
            assert weight.std() == pytest.approx(config.initializer_range, rel=0.15), name
    inverse = 1e4 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    torch.testing.assert_close(drafter.rotary_emb.inv_freq, inverse)
    assert torch.equal(drafter.rotary_emb.inv_freq, drafter.rotary_emb.original_inv_freq)


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "initializer_range": 0.1}])
def test_new_drafter_is_initialised_by_our_rule(target, overrides):
    config = DominoConfig.for_target(target.config, causal_state_size=16, correction_rank=8, **overrides)
    with poisoned_memory():
        drafter = DominoDrafter(config)
    assert_initialised(drafter)


def test_loading_leaves_no_uninitialised_memory(tmp_path, drafter):
    drafter.save_pretrained(tmp_path)
    with poisoned_memory():
        loaded = DominoDrafter.from_pretrained(tmp_path)
    for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        assert torch.equal(tensor, drafter.get_parameter_or_buffer(name)), name


def test_warm_start_from_a_file_without_a_head(tmp_path, target, caplog):
    backbone = DominoDrafter(DominoConfig.for_target(target.config, causal_state_size=16, correction_rank=8))
    backbone.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    head = tensor_names(4, True) - tensor_names(4, False)
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in head}, file, {"format": "pt"})
    with poisoned_memory():
        loaded, info = DominoDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == head
    assert "has no Domino head" in caplog.text
    assert_initialised(loaded)


# The backbone


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, position, theta):
    """One head's vector, its first half paired with its second half."""
    half = x.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def written_out(drafter, block, features):
    """The backbone as the paper writes it, one query and one head at a time; [L, H] and [C, ...] -> [L, H]."""
    config, eps = drafter.config, drafter.config.rms_norm_eps
    context = rms_norm(features @ drafter.fc.weight.T, drafter.hidden_norm.weight, eps)
    anchor, x = len(context), block
    for layer, kind in zip(drafter.layers, config.layer_types):
        attention = layer.self_attn
        y = rms_norm(x, layer.input_layernorm.weight, eps)

        def heads(projection, vectors, norm=None, first=0, attention=attention):
            vectors = getattr(attention, projection)(vectors).unflatten(-1, (-1, config.head_dim))
            if norm is not None:
                if config.use_qk_norm:
                    vectors = rms_norm(vectors, getattr(attention, norm).weight, eps)
                theta = config.rope_parameters["rope_theta"]
                vectors = torch.stack(
                    [torch.stack([rotated(head, first + i, theta) for head in v]) for i, v in enumerate(vectors)]
                )
            return vectors

        both = torch.cat([context, y])
        queries, keys, values = (
            heads("q_proj", y, "q_norm", anchor),
            heads("k_proj", both, "k_norm"),
            heads("v_proj", both),
        )
        causal = config.is_causal if config.is_causal is not None else kind == "sliding_attention"
        out = torch.zeros_like(queries)
        for i in range(len(y)):
            seen = [
                j
                for j in range(len(both))
                if not (causal and j > anchor + i)
                and not (kind == "sliding_attention" and anchor + i - j >= config.sliding_window)
            ]
            for h in range(config.num_attention_heads):
                group = h * config.num_key_value_heads // config.num_attention_heads
                weights = (keys[seen, group] @ queries[i, h] * config.head_dim**-0.5).softmax(0)
                out[i, h] = weights @ values[seen, group]
        x = x + attention.o_proj(out.flatten(1))
        y = rms_norm(x, layer.post_attention_layernorm.weight, eps)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    return rms_norm(x, drafter.norm.weight, eps)


@pytest.mark.parametrize("count", [0, 1, 13])
@pytest.mark.parametrize(
    "overrides",
    [*KINDS, dict(use_qk_norm=False, attention_bias=True, num_key_value_heads=4, target_layer_ids=[1])],
    ids=str,
)
@torch.no_grad()
def test_backbone_is_what_the_paper_writes(target, overrides, count):
    drafter = sharp(tiny_drafter(target, **overrides))
    x, context = block(drafter), features(drafter, count)
    torch.testing.assert_close(drafter(x, context)[0], written_out(drafter, x[0], context[0]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_backbone_without_context_is_a_bidirectional_qwen3(target):
    drafter = sharp(tiny_drafter(target))
    sizes = {name: getattr(drafter.config, name) for name in ("intermediate_size", "num_attention_heads", "head_dim")}
    config = Qwen3Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, rope_theta=10000.0, **sizes
    )
    qwen3 = Qwen3Model(config).eval()
    missing, _ = qwen3.load_state_dict(drafter.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight"]
    x = block(drafter)
    mask = torch.zeros(1, 1, x.shape[1], x.shape[1])
    expected = qwen3(inputs_embeds=x, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(drafter(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("overrides", KINDS, ids=str)
@torch.no_grad()
def test_attention_implementations_agree(target, overrides, implementation):
    drafter, results = sharp(tiny_drafter(target, **overrides)), []
    for chosen in ("eager", implementation):
        drafter.set_attn_implementation(chosen)
        context = ContextCache(2)
        first = drafter(block(drafter, 2), features(drafter, 13, 2), context)
        results.append(torch.cat([first, drafter(block(drafter, 2), features(drafter, 3, 2), context)]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [GlmConfig, CohereConfig])
@torch.no_grad()
def test_rotary_layout_is_the_drafters_own(family):
    """GLM and Cohere interleave the halves of a head; their drafters don't."""
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    sizes |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    drafters = [
        sharp(DominoDrafter(DominoConfig.for_target(config(**sizes), rms_norm_eps=1e-6)))
        for config in (family, LlamaConfig)
    ]
    results = [drafter(block(drafter), features(drafter, 9)) for drafter in drafters]
    assert torch.equal(*results)


@pytest.mark.parametrize("past", [0, 5])
@torch.no_grad()
def test_positions_count_on_from_the_context(drafter, past):
    def run(**kwargs):
        context = ContextCache(drafter.config.num_hidden_layers)
        if past:
            drafter(block(drafter), features(drafter, past), context)
        return drafter(block(drafter), features(drafter, 4, seed=3), context, **kwargs)

    explicit = torch.arange(past, past + 4 + drafter.config.block_size)[None]
    assert torch.equal(run(), run(position_ids=explicit))
    assert not torch.allclose(run(), run(position_ids=explicit + torch.arange(explicit.shape[1])))


@torch.no_grad()
def test_batch_of_two_is_two_of_one(target):
    drafter = sharp(tiny_drafter(target, **SLIDING))
    x, context = block(drafter, batch=2), features(drafter, 13, batch=2)
    alone = torch.cat([drafter(x[i : i + 1], context[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(drafter(x, context), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_inputs_are_cast_to_the_drafter(drafter):
    x, context = block(drafter), features(drafter, 5)
    assert torch.equal(drafter(x.double(), context.double()), drafter(x, context))


@torch.no_grad()
def test_drafting_in_train_mode_has_no_dropout(target):
    drafter = tiny_drafter(target, attention_dropout=0.5)
    expected = drafter(block(drafter), features(drafter, 5))
    assert torch.equal(drafter.train()(block(drafter), features(drafter, 5)), expected)
    with torch.enable_grad():
        assert not torch.equal(drafter(block(drafter), features(drafter, 5)), expected)


def test_gradient_checkpointing_gives_the_same_gradients(target):
    drafter = tiny_drafter(target, **SLIDING).train()

    def gradients():
        drafter.zero_grad()
        drafter(block(drafter), features(drafter, 13)).square().sum().backward()
        return [weight.grad.clone() for weight in drafter.layers.parameters()] + [drafter.fc.weight.grad.clone()]

    expected = gradients()
    drafter.gradient_checkpointing_enable()
    assert drafter.is_gradient_checkpointing
    for ours, theirs in zip(gradients(), expected):
        torch.testing.assert_close(ours, theirs)
        assert theirs.any()


# What a block sees


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("is_causal", [None, False, True])
def test_visible_is_the_rule(layer_type, is_causal):
    """Context strictly before the anchor and the query's own block, which causal layers see only backwards."""
    config = DominoConfig(
        vocab_size=9, mask_token_id=8, target_layer_ids=[0], block_size=3, sliding_window=4, is_causal=is_causal
    )
    anchors = [2, 3, 7]
    keys = [(position, -1) for position in range(10)] + [(a + i, a) for a in anchors for i in range(3)]
    queries = keys[10:]
    expected = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for q, (query, anchor) in enumerate(queries):
        for k, (key, key_anchor) in enumerate(keys):
            if key_anchor == -1:
                seen = key < anchor
            else:
                backwards = is_causal if is_causal is not None else layer_type == "sliding_attention"
                seen = key_anchor == anchor and (key <= query or not backwards)
            if layer_type == "sliding_attention" and query - key >= 4:
                seen = False
            expected[q, k] = seen
    (query_position, query_block), (key_position, key_block) = torch.tensor(queries).T, torch.tensor(keys).T
    seen = visible(config, layer_type, query_position[:, None], key_position, query_block[:, None], key_block)
    assert torch.equal(seen, expected)


def changed_slots(drafter, change_block=None, change_feature=None, count=20):
    """Slots whose vector changes when one slot's embedding, or one context token's features, change."""
    x, context = block(drafter), features(drafter, count)
    before = drafter(x, context)
    if change_block is not None:
        x[:, change_block] += 1
    if change_feature is not None:
        context[:, change_feature] += 1
    return (drafter(x, context) != before).any(-1)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@torch.no_grad()
def test_context_is_seen_in_the_window_only(target, layer_type):
    drafter = sharp(tiny_drafter(target, num_hidden_layers=1, layer_types=[layer_type], sliding_window=8))
    slots = range(drafter.config.block_size)
    for position in range(20):
        seen = [slot for slot in slots if layer_type == "full_attention" or 20 + slot - position < 8]
        assert changed_slots(drafter, change_feature=position) == seen


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("is_causal", [None, False, True])
@torch.no_grad()
def test_block_is_seen_both_ways_or_backwards(target, layer_type, is_causal):
    """As in the published drafters, sliding layers look backwards only, unless `is_causal` says otherwise."""
    overrides = dict(layer_types=[layer_type], sliding_window=8, is_causal=is_causal)
    drafter = sharp(tiny_drafter(target, num_hidden_layers=1, **overrides))
    backwards = is_causal if is_causal is not None else layer_type == "sliding_attention"
    for slot in range(8):
        assert changed_slots(drafter, change_block=slot) == list(range(slot if backwards else 0, 8))


# The context


@pytest.mark.parametrize("overrides", KINDS, ids=str)
@torch.no_grad()
def test_drafting_round_by_round_is_drafting_at_once(target, overrides):
    drafter = sharp(tiny_drafter(target, **overrides))
    context, length = ContextCache(2), 0
    everything = features(drafter, 600)
    for i, count in enumerate([5, 1, 3, 0, 8, 300, 2, 281]):
        x = block(drafter, seed=i)
        drafted = drafter(x, everything[:, length : length + count], context)
        length += count
        assert context.length == length
        torch.testing.assert_close(drafted, drafter(x, everything[:, :length]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overrides", [{}, SLIDING], ids=str)
@torch.no_grad()
def test_nothing_of_a_block_is_left_for_the_next(target, overrides):
    drafter = sharp(tiny_drafter(target, **overrides))
    clean, soiled = ContextCache(2), ContextCache(2)
    first, second = features(drafter, 6), features(drafter, 2, seed=3)
    drafter(block(drafter), first, clean)
    drafter(torch.full_like(block(drafter), torch.nan), first, soiled)
    assert torch.equal(drafter(block(drafter), second, soiled), drafter(block(drafter), second, clean))


@torch.no_grad()
def test_drafter_keeps_no_state(drafter):
    before = {name: tensor.clone() for name, tensor in drafter.state_dict(keep_vars=True).items()}
    attributes = set(vars(drafter))
    first = drafter(block(drafter), features(drafter, 5), ContextCache(2))
    assert torch.equal(drafter(block(drafter), features(drafter, 5), ContextCache(2)), first)
    assert set(vars(drafter)) == attributes
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in before.items())


def test_one_drafter_serves_many_threads(target):
    drafter = sharp(tiny_drafter(target, **SLIDING))

    @torch.no_grad()
    def rounds(seed):
        context = ContextCache(2)
        return torch.cat(
            [drafter(block(drafter, seed=seed), features(drafter, n, seed=n), context) for n in (seed, 1, 2)]
        )

    expected, results = {seed: rounds(seed) for seed in (3, 4)}, {}
    threads = [
        Thread(target=lambda seed=seed: results.update({seed: [rounds(seed) for _ in range(20)]})) for seed in (3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (3, 4):
        assert len(results[seed]) == 20
        assert all(torch.equal(result, expected[seed]) for result in results[seed])


# Drafting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafting_in_either_precision(target, dtype):
    drafter = tiny_drafter(target).to(dtype)
    plain = target.generate(**inputs(), max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(**inputs(), max_new_tokens=12, do_sample=False, assistant_model=drafter), plain)
