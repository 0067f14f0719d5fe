import errno
import json
from unittest import mock

import pytest
import torch

from hf_domino.target import Target
from hf_domino.training import features as features_module
from hf_domino.training.features import (
    Conversations,
    FeatureCache,
    cache_features,
    cache_fingerprint,
    collate,
    compute_features,
)
from tests.tiny import MASK, tiny_target

LAYERS = [0, 2]
CLOSE = dict(rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_target().requires_grad_(False))


def random_records(lengths=(20, 9, 33, 14, 27), prompt=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(0, MASK, (length,), generator=generator).tolist(),
            "loss_mask": [0] * prompt + [1] * (length - prompt),
        }
        for length in lengths
    ]


def test_features_are_the_targets_hidden_states(target):
    records = random_records()
    batch = collate([Conversations(records)[i] for i in range(5)])
    features, last_hidden = compute_features(
        target, batch["input_ids"], batch["attention_mask"], LAYERS, last_hidden=True
    )
    for row, record in enumerate(records):
        ids = torch.tensor([record["input_ids"]])
        with torch.no_grad():
            outputs = target.model(ids, output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[i + 1] for i in LAYERS], dim=-1)[0]
        torch.testing.assert_close(features[row, : len(states)], states, **CLOSE)
        torch.testing.assert_close(target.base_logits(last_hidden[row, : len(states)]), outputs.logits[0], **CLOSE)
        assert not features[row, len(states) :].any() and not last_hidden[row, len(states) :].any()


def test_collate_pads_on_the_right():
    data = Conversations(random_records((6, 9)))
    batch = collate([data[0], data[1]])
    assert batch["input_ids"].shape == batch["loss_mask"].shape == (2, 9)
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 3, [1] * 9]
    assert batch["loss_mask"][0].int().tolist() == [0] * 4 + [1] * 2 + [0] * 3
    assert len(set(batch["record_ids"].tolist())) == 2


def test_conversations_without_an_anchor_are_left_out_and_counted():
    records = random_records()
    records[1]["loss_mask"] = [0, 1] * 4 + [0]
    records[3]["loss_mask"] = [0] * 14
    data = Conversations(records)
    assert len(data) == 3 and data.num_skipped == 2
    assert len(Conversations(records, max_length=8)[0]["input_ids"]) == 8
    with pytest.raises(ValueError, match="none of 5 conversations has two supervised tokens in a row within 4 tokens"):
        Conversations(records, max_length=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_features_are_the_online_ones(target, tmp_path, dtype):
    records = random_records()
    cache = cache_features(
        target, records, LAYERS, tmp_path, last_hidden=True, dtype=dtype, batch_size=2, tokens_per_shard=40
    )
    assert len(cache.shards) > 1
    batch = collate([Conversations(records, max_length=25, cache=cache)[i] for i in range(5)])
    features, last_hidden = compute_features(
        target, batch["input_ids"], batch["attention_mask"], LAYERS, last_hidden=True
    )
    assert batch["features"].dtype == dtype
    close = CLOSE if dtype == torch.float32 else dict(rtol=0.01, atol=0.01)  # one step of bfloat16
    torch.testing.assert_close(batch["features"], features.to(dtype), **close)
    torch.testing.assert_close(batch["last_hidden"], last_hidden.to(dtype), **close)


def test_caching_states_its_space_and_refuses_a_disk_without_it(target, tmp_path, capsys):
    records = random_records()
    tokens = sum(len(record["input_ids"]) for record in records)
    with mock.patch.object(features_module, "_gb", lambda size: f"{size} bytes"):
        cache_features(target, records, LAYERS, tmp_path / "a", last_hidden=True)
        assert f"take {tokens * 3 * 32 * 2} bytes in" in capsys.readouterr().out
        usage = mock.Mock(free=100)
        with (
            mock.patch("shutil.disk_usage", return_value=usage),
            pytest.raises(OSError, match=f"take {tokens * 2 * 32 * 2} bytes and 100 bytes are free"),
        ):
            cache_features(target, records, LAYERS, tmp_path / "b")


def test_a_full_disk_keeps_the_finished_shards_and_the_same_call_goes_on(target, tmp_path):
    records, written = random_records(), []

    def save_until_full(tensors, path):
        if len(written) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        save_file(tensors, path)

    save_file = features_module.save_file
    small = dict(batch_size=1, tokens_per_shard=1, progress=False)
    with (
        mock.patch.object(features_module, "save_file", save_until_full),
        pytest.raises(OSError, match="No space left on device.*finished shards are safe"),
    ):
        cache_features(target, records, LAYERS, tmp_path, **small)
    assert not list(tmp_path.glob("*.tmp")) and len(FeatureCache(tmp_path).places) == 2
    with mock.patch.object(features_module, "compute_features", wraps=compute_features) as computed:
        cache = cache_features(target, records, LAYERS, tmp_path, **small)
    assert computed.call_count == 1 + 3  # the probe, and what was missing
    assert len(Conversations(records, cache=cache)[0]["features"]) == 20


def test_a_cache_grows_with_the_data(target, tmp_path):
    records, more = random_records(), random_records(seed=1)
    cache = cache_features(target, records, LAYERS, tmp_path, progress=False)
    with pytest.raises(ValueError, match="lacks 5 of 10 conversations"):
        Conversations(records + more, cache=cache)
    cache = cache_features(target, records + more, LAYERS, tmp_path, progress=False)
    assert len(Conversations(records + more, cache=cache)) == 10


def test_a_cache_with_last_hidden_states_serves_who_needs_none(target, tmp_path):
    records, more = random_records(), random_records(seed=1)
    cache_features(target, records, LAYERS, tmp_path, last_hidden=True, progress=False)
    with mock.patch.object(features_module, "compute_features", wraps=compute_features) as computed:
        cache_features(target, records, LAYERS, tmp_path, progress=False)
    assert computed.call_count == 1  # the probe alone
    cache = cache_features(target, records + more, LAYERS, tmp_path, progress=False)
    assert all("last_hidden" in item for item in Conversations(records + more, cache=cache))


def test_a_cache_of_something_else_is_refused(target, tmp_path):
    records = random_records()
    cache_features(target, records, LAYERS, tmp_path, progress=False, max_length=30)

    def refused(match, target=target, layers=LAYERS, **kwargs):
        with pytest.raises(ValueError, match=match):
            cache_features(target, records, layers, tmp_path, progress=False, **kwargs)

    refused(r"its layer_ids is \[0, 2\], not \[0, 1\]", layers=[0, 1])
    refused("lacks the last hidden states", last_hidden=True)
    refused("cut to 30 tokens, not 3072")
    refused("holds .*'max_length': 30.*choose another folder", max_length=20)
    refused("its vocab_size is 97, not 98", target=Target(tiny_target(vocab_size=98)))
    fine_tuned = tiny_target()
    with torch.no_grad():
        fine_tuned.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    refused("other hidden states", target=Target(fine_tuned), max_length=30)
    with pytest.raises(FileNotFoundError, match="no feature cache"):
        FeatureCache(tmp_path / "elsewhere")


def test_another_dtype_is_the_same_target(tmp_path):
    low = tiny_target(initializer_range=0.2).bfloat16()
    cache = cache_features(Target(low), random_records(), LAYERS, tmp_path, progress=False)
    cache.check(cache_fingerprint(Target(low.float()), LAYERS))


def test_a_cache_survives_a_loaders_worker(target, tmp_path):
    records = random_records()
    cache = cache_features(target, records, LAYERS, tmp_path, progress=False)
    data = Conversations(records, cache=cache)
    here = data[0]["features"]
    loader = torch.utils.data.DataLoader(data, batch_size=1, collate_fn=collate, num_workers=1)
    assert torch.equal(next(iter(loader))["features"][0], here)
    assert json.loads((tmp_path / "index.json").read_text())["kind"]["dtype"] == "torch.bfloat16"
