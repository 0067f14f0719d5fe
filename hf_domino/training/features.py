"""What the drafter sees of its target in training: hidden states, computed as they are needed or once ahead.

compute_features   the chosen layers' outputs for a batch
cache_features     the same for a whole data set, in safetensors shards with an index
Conversations      records, with cached features or without, as a data set; `collate` makes batches of it
"""

import hashlib
import inspect
import json
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..target import hidden_states_request
from .data import target_fingerprint

INDEX_FILE = "index.json"
_PROBE_LENGTH = 16
# Relative distance of hidden states that dtypes and devices make; another target's are far beyond it.
_PROBE_TOLERANCE = 0.05


@torch.no_grad()
def compute_features(target, input_ids, attention_mask, layer_ids, last_hidden: bool = False):
    """Hidden states of the target as its drafter sees them.

    Args:
        target ([`Target`]): The target.
        input_ids, attention_mask: [B, T], padded on the right.
        layer_ids: zero-based decoder layers.
        last_hidden: also return the final-normed hidden state, which [`Target.base_logits`] turns into the target's
            distribution.

    Returns:
        Features [B, T, len(layer_ids) * target_hidden_size], and [B, T, target_hidden_size] or None. Zero at padding.
    """
    last_layer = [target.config.num_hidden_layers - 1] if last_hidden else []
    # The logits of the whole text are not asked for, only its hidden states.
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(target.model.forward).parameters else {}
    outputs = target.model(
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        output_hidden_states=hidden_states_request([*layer_ids, *last_layer]),
        use_cache=False,
        return_dict=True,
        **few,
    )

    def at_tokens(layers):
        states = target.features(outputs.hidden_states, layers)
        return states.masked_fill(attention_mask.to(states.device)[..., None] == 0, 0)

    return at_tokens(layer_ids), at_tokens(last_layer) if last_hidden else None


# ---- the data set


class Conversations(Dataset):
    """Records of [`load_conversations`] as tensors; those that no anchor fits in are left out and counted.

    Args:
        records: dicts with `input_ids` and `loss_mask`.
        max_length (`int`): Longer ones are cut.
        cache ([`FeatureCache`], *optional*): Where the features of all of them are.

    Raises:
        ValueError: nothing can be trained on, or the cache lacks some of the records.
    """

    def __init__(self, records, max_length: int = 3072, cache: "FeatureCache | None" = None):
        self.cache = cache
        self.records = []
        self.num_skipped = 0
        for record in records:
            ids, mask = torch.tensor(record["input_ids"])[:max_length], torch.tensor(record["loss_mask"]).bool()
            mask = mask[:max_length]
            if (mask[:-1] & mask[1:]).any():
                self.records.append((ids, mask, _digest(record["input_ids"])))
            else:
                self.num_skipped += 1
        if not self.records:
            raise ValueError(
                f"There is nothing to train on: none of {self.num_skipped} conversations has two supervised tokens in "
                f"a row within {max_length} tokens."
            )
        if cache is not None:
            missing = sum(digest not in cache.places for _, _, digest in self.records)
            if missing:
                raise ValueError(
                    f"The feature cache {cache.folder} lacks {missing} of {len(self.records)} conversations: cache the "
                    "features of this data first (cache_features adds what is missing)."
                )

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        ids, mask, digest = self.records[index]
        item = {"input_ids": ids, "loss_mask": mask, "record_ids": int(digest[:15], 16)}
        return item if self.cache is None else item | self.cache.read(digest, len(ids))


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """Batch items of [`Conversations`], padded on the right; `attention_mask` tells tokens from padding."""
    longest = max(len(item["input_ids"]) for item in items)

    def pad(tensor):
        return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, longest - len(tensor)])

    batch = {name: torch.stack([pad(item[name]) for item in items]) for name in items[0] if name != "record_ids"}
    batch["record_ids"] = torch.tensor([item["record_ids"] for item in items])
    batch["attention_mask"] = torch.stack([pad(torch.ones_like(item["input_ids"])) for item in items])
    return batch


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(torch.tensor(ids).numpy().tobytes()).hexdigest()[:24]


# ---- the cache


def cache_features(
    target,
    records,
    layer_ids: list[int],
    folder: str | os.PathLike,
    last_hidden: bool = False,
    max_length: int = 3072,
    dtype: torch.dtype = torch.bfloat16,
    batch_size: int = 8,
    tokens_per_shard: int = 2**17,
    progress: bool = True,
) -> "FeatureCache":
    """Compute the features of all records once and keep them as safetensors shards.

    It says how much space that takes before it starts. A run that was stopped, or a data set that has grown, goes on
    from the shards that are there.

    Args:
        target ([`Target`]): The target.
        records: dicts with `input_ids`.
        layer_ids: the drafter's `target_layer_ids`.
        folder: where the shards and `index.json` go.
        last_hidden: keep the last hidden state too, which soft targets and total variation need.
        max_length: tokens of a record that are kept.
        dtype: of the shards.

    Raises:
        ValueError: the folder holds features of another target, other layers or another kind.
        OSError: the disk has too little room, or is full; finished shards stay and the same call goes on from them.
    """
    folder = Path(folder)
    fingerprint = cache_fingerprint(target, layer_ids)
    shards, cache = [], None
    if (folder / INDEX_FILE).is_file():
        cache = FeatureCache(folder)
        last_hidden = last_hidden or cache.kind["last_hidden"]  # what is there beyond the need stays in use
    kind = {"last_hidden": last_hidden, "max_length": max_length, "dtype": str(dtype)}
    if cache is not None:
        cache.check(fingerprint, last_hidden, max_length)
        if cache.kind != kind:
            raise ValueError(f"The feature cache {folder} holds {cache.kind}, not {kind}: choose another folder.")
        shards = cache.shards
    cached = {digest for shard in shards for digest, _ in shard["records"]}
    pending = {_digest(record["input_ids"]): record["input_ids"][:max_length] for record in records}
    pending = sorted(((d, ids) for d, ids in pending.items() if d not in cached), key=lambda item: -len(item[1]))

    width = (len(layer_ids) + last_hidden) * target.config.hidden_size
    space = sum(len(ids) for _, ids in pending) * width * dtype.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if progress:
        tqdm.write(f"The features of {len(pending)} conversations take {_gb(space)} in {folder}; {_gb(free)} are free.")
    if space > free:
        raise OSError(f"Not enough room in {folder}: the features take {_gb(space)} and {_gb(free)} are free.")

    with tqdm(total=len(pending), unit="conv", desc="features", disable=not progress) as bar:
        while pending:
            shard, tokens = [], 0
            while pending and tokens < tokens_per_shard:
                shard.append(pending.pop(0))
                tokens += len(shard[-1][1])
            tensors = _shard_tensors(target, shard, layer_ids, last_hidden, dtype, batch_size, bar)
            name = f"features-{len(shards):05d}.safetensors"
            shards.append({"file": name, "records": [[digest, len(ids)] for digest, ids in shard]})
            _write_shard(folder, name, tensors, {"fingerprint": fingerprint, "kind": kind, "shards": shards})
    return FeatureCache(folder)


def _shard_tensors(target, shard, layer_ids, last_hidden, dtype, batch_size, bar):
    rows = {"features": [], "last_hidden": []}
    for start in range(0, len(shard), batch_size):
        batch = [torch.tensor(ids) for _, ids in shard[start : start + batch_size]]
        input_ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        lengths = torch.tensor([len(ids) for ids in batch])
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        outputs = compute_features(target, input_ids, mask, layer_ids, last_hidden)
        for name, values in zip(rows, outputs):
            if values is not None:
                rows[name] += [row[:length].to("cpu", dtype) for row, length in zip(values, lengths)]
        bar.update(len(batch))
    return {name: torch.cat(values) for name, values in rows.items() if values}


def _write_shard(folder, name, tensors, index):
    """A shard counts once the index names it; both appear only whole."""
    unfinished = folder / f"{name}.tmp"
    try:
        save_file(tensors, unfinished)
        unfinished.replace(folder / name)
        new_index = folder / f"{INDEX_FILE}.tmp"
        new_index.write_text(json.dumps(index), encoding="utf-8")
        new_index.replace(folder / INDEX_FILE)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(
            f"{folder / name} can't be written ({error}); the finished shards are safe, and the same call goes on from "
            "them."
        ) from error


def _gb(size):
    return f"{size / 1e9:.2f} GB"


class FeatureCache:
    """Cached features, read from the disk as they are needed.

    Args:
        folder: what [`cache_features`] wrote.

    Raises:
        FileNotFoundError: there is no cache.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        if not (self.folder / INDEX_FILE).is_file():
            raise FileNotFoundError(f"{folder} holds no feature cache: it has no {INDEX_FILE}.")
        index = json.loads((self.folder / INDEX_FILE).read_text(encoding="utf-8"))
        self.fingerprint, self.kind, self.shards = index["fingerprint"], index["kind"], index["shards"]
        self.places = {}
        for shard in self.shards:
            start = 0
            for digest, length in shard["records"]:
                self.places[digest] = (shard["file"], start, length)
                start += length
        self._open = {}

    def check(self, fingerprint: dict, last_hidden: bool = False, max_length: int = 0) -> None:
        """Compare with the pairing at hand, see [`cache_fingerprint`], and with what is asked of the cache.

        Raises:
            ValueError: what differs or is missing.
        """
        probe, other_probe = torch.tensor(self.fingerprint["probe"]), torch.tensor(fingerprint["probe"])
        problems = [
            f"its {name} is {value}, not {fingerprint[name]}"
            for name, value in self.fingerprint.items()
            if name != "probe" and value != fingerprint[name]
        ]
        if not problems and (probe - other_probe).norm() > _PROBE_TOLERANCE * probe.norm():
            problems.append("its target gave other hidden states for a fixed text")
        if last_hidden and not self.kind["last_hidden"]:
            problems.append("it lacks the last hidden states that soft targets need")
        if max_length > self.kind["max_length"]:
            problems.append(f"it was cut to {self.kind['max_length']} tokens, not {max_length}")
        if problems:
            raise ValueError(f"The feature cache {self.folder} can't be used here: {'; '.join(problems)}.")

    def read(self, digest: str, length: int) -> dict[str, torch.Tensor]:
        """The first `length` rows of a record's features (and last hidden states)."""
        file, start, _ = self.places[digest]
        # An open file does not survive a fork into a loader's worker.
        key = (os.getpid(), file)
        if key not in self._open:
            self._open[key] = safe_open(self.folder / file, framework="pt")
        shard = self._open[key]
        return {name: shard.get_slice(name)[start : start + length] for name in shard.keys()}  # noqa: SIM118

    def __getstate__(self):
        return {**self.__dict__, "_open": {}}


def cache_fingerprint(target, layer_ids) -> dict:
    """What a cache must agree on: the target (configuration and weights) and the layers.

    Weights are told apart by some embeddings, and by the hidden states of a fixed text, which are compared with a
    tolerance: a cache may be made on another device.
    """
    vocab_size = target.config.vocab_size
    text = (torch.arange(_PROBE_LENGTH)[None] * 7919 + 13) % vocab_size
    features, _ = compute_features(target, text, torch.ones_like(text), layer_ids)
    return {
        "target": target_fingerprint(target.model),
        "vocab_size": vocab_size,
        "layer_ids": list(layer_ids),
        "probe": features[0, -1].float().cpu().tolist(),
    }
