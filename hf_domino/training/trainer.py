"""DominoTrainer: transformers' Trainer around a drafter, with its frozen target beside it."""

import copy
import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import Trainer, TrainingArguments

from ..hub import write_card
from ..target import Target
from .eagle3 import Eagle3Objective
from .features import Conversations, FeatureCache, cache_fingerprint, collate, compute_features
from .objective import DraftingObjective, base_loss_weight, draw_anchors, summarize
from .walk import walk

logger = logging.getLogger(__name__)


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the published recipe as defaults, and what is Domino's own.

    Sources: Domino, arXiv 2605.29707, section 5.1 and the authors' SpecForge recipe; DFlash, arXiv 2602.06036, A.1.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "AdamW's highest learning rate."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's weight decay."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up; below 1 a share of the run."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Has no effect here."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Not needed: every parameter has a gradient in every step."}
    )
    max_length: int = field(default=3072, metadata={"help": "Conversations are cut to this many tokens."})
    num_anchors: int = field(default=256, metadata={"help": "Anchors drawn on every sequence, anew in every epoch."})
    lambda_start: float = field(default=1.0, metadata={"help": "Weight of the base loss at the first step."})
    lambda_share: float = field(default=1.0, metadata={"help": "Share of the run over which that weight falls to 0."})
    decay: float | None = field(
        default=None, metadata={"help": "Gamma of the position weights exp(-j / gamma). Default: by the block size."}
    )
    soft_target_weight: float = field(
        default=0.0, metadata={"help": "Share of the loss that is on the target's distribution, not its token."}
    )
    total_variation_weight: float = field(
        default=0.0, metadata={"help": "Weight of the total variation between draft and target distribution."}
    )
    loss_vocabulary_size: int | None = field(
        default=None, metadata={"help": "Restrict the loss to this many tokens, the most frequent ones of the answers."}
    )
    loss_chunk_size: int = field(default=128, metadata={"help": "Drafts whose logits are in memory at once."})
    log_slots: bool = field(default=False, metadata={"help": "Log the accuracy of every slot of the block."})

    def __post_init__(self):
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self.metric_for_best_model = "acceptance_length"
        super().__post_init__()


class DominoTrainer(Trainer):
    """Trains a drafter for a target; only the drafter is wrapped, trained and saved.

    It logs base and final loss and accuracy apart, so that a collapse of the base is seen; evaluation is the [`walk`]
    through held-out answers, which gives the acceptance lengths of generation.

    Args:
        drafter ([`DominoDrafter`] or [`Eagle3Drafter`]): In float32 as a rule; `bf16=True` trains in mixed precision.
        target (`PreTrainedModel`): In any dtype or quantisation, on its device. It is frozen.
        args ([`DominoTrainingArguments`]): The recipe.
        train_dataset, eval_dataset: records of [`load_conversations`], or [`Conversations`].
        feature_cache ([`FeatureCache`], *optional*): Where the features of all records are. Default: the target
            computes them as they are needed.
        kwargs: as in `Trainer`.

    Raises:
        ValueError: drafter, target, data and cache don't fit together.
    """

    def __init__(
        self,
        drafter,
        target,
        args: DominoTrainingArguments,
        train_dataset=None,
        eval_dataset=None,
        feature_cache: FeatureCache | None = None,
        **kwargs,
    ):
        self.target = Target(target.requires_grad_(False).eval())
        self.target.check_pairing(drafter.config)
        self.layer_ids = drafter.config.feature_layers(self.target.config.num_hidden_layers)
        train_dataset = as_conversations(train_dataset, args.max_length, feature_cache)
        eval_dataset = as_conversations(eval_dataset, args.max_length, feature_cache)
        objective = (Eagle3Objective if drafter.config.method == "eagle3" else DraftingObjective)(
            drafter,
            self.target,
            decay=args.decay,
            soft_target_weight=args.soft_target_weight,
            total_variation_weight=args.total_variation_weight,
            loss_vocabulary=most_frequent_tokens(train_dataset, args.loss_vocabulary_size),
            chunk_size=args.loss_chunk_size,
        )
        if feature_cache is not None:
            fingerprint = cache_fingerprint(self.target, self.layer_ids)
            feature_cache.check(fingerprint, objective.needs_last_hidden, args.max_length)
        base_loss_weight(0, 1, args.lambda_start, args.lambda_share)
        self._sums, self._base_weight = {}, None
        super().__init__(
            model=objective,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        # Several GPUs are for several processes (accelerate launch), not for threads of one.
        self.args._n_gpu = min(1, self.args.n_gpu)

    @property
    def drafter(self):
        return self.accelerator.unwrap_model(self.model).drafter

    # ---- a step

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one optimiser step, with their anchors, and the sum of all their drafts' weights."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        objective = self.accelerator.unwrap_model(self.model)
        total = torch.zeros((), device=device)
        for batch in batches:
            anchors = draw_anchors(
                batch["loss_mask"], batch["record_ids"], self.args.num_anchors, seed, epoch=int(self.state.epoch)
            )
            batch["anchors"] = anchors.to(batch["input_ids"].device)
            total += objective.draft_weights(batch["input_ids"], batch["loss_mask"], batch["anchors"]).sum().to(device)
        return batches, self.accelerator.reduce(total, "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args = self.args
        self._base_weight = base_loss_weight(
            self.state.global_step, self.state.max_steps, args.lambda_start, args.lambda_share
        )
        loss, sums = model(
            inputs["input_ids"],
            inputs["loss_mask"],
            inputs["anchors"],
            base_weight=self._base_weight,
            normalizer=num_items_in_batch,
            **self.features(inputs),
        )
        self._sums = {name: value + self._sums.get(name, 0) for name, value in sums.items()}
        # Processes average their gradients, but the loss is normalised over all of them already.
        loss = loss * self.accelerator.num_processes
        return (loss, sums) if return_outputs else loss

    def features(self, batch) -> dict[str, torch.Tensor]:
        """Features, and last hidden states where the loss needs them: from the cache, or from the target now."""
        needs_last_hidden = self.accelerator.unwrap_model(self.model).needs_last_hidden
        if "features" in batch:
            names = ("features", "last_hidden") if needs_last_hidden else ("features",)
            return {name: batch[name] for name in names}
        features, last_hidden = compute_features(
            self.target, batch["input_ids"], batch["attention_mask"], self.layer_ids, needs_last_hidden
        )
        device = batch["input_ids"].device
        return {"features": features.to(device)} | (
            {"last_hidden": last_hidden.to(device)} if needs_last_hidden else {}
        )

    def log(self, logs, start_time=None):
        if "loss" in logs and self._sums:
            sums = {name: self.accelerator.reduce(value, "sum") for name, value in self._sums.items()}
            logs |= {"lambda": self._base_weight, **summarize(sums, self.args.log_slots)}
            self._sums = {}
        super().log(logs, start_time)

    # ---- evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Walk through the held-out answers; reports the acceptance length of the drafter and of its base alone."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        dataset = as_conversations(dataset, self.args.max_length, getattr(self.train_dataset, "cache", None))
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return metrics
        start = time.time()
        drafter, share, shares = self._drafter_as_it_will_run()
        totals = torch.zeros(2, 2, device=self.args.device)
        size = self.args.eval_batch_size
        # Alike lengths together: a batch is walked until its longest answer ends.
        mine = sorted(range(share, len(dataset), shares), key=lambda i: len(dataset.records[i][0])) if drafter else []
        for first in tqdm(range(0, len(mine), size), desc="walk", leave=False, disable=self.args.disable_tqdm):
            batch = self._prepare_inputs(collate([dataset[i] for i in mine[first : first + size]]))
            features = self.features(batch)["features"]
            for row, use_head in enumerate((False, True)):
                acceptance = walk(drafter, self.target, batch["input_ids"], batch["loss_mask"], features, use_head)
                totals[row] += torch.tensor([sum(acceptance.lengths), len(acceptance.lengths)], device=totals.device)
        base, final = self.accelerator.reduce(totals, "sum")
        metrics = {
            f"{metric_key_prefix}_acceptance_length": (final[0] / final[1].clamp(min=1)).item(),
            f"{metric_key_prefix}_base_acceptance_length": (base[0] / base[1].clamp(min=1)).item(),
            f"{metric_key_prefix}_runtime": round(time.time() - start, 2),
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _drafter_as_it_will_run(self):
        """A copy of the drafter in the target's dtype, and this process's share of the walk: which of how many."""
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            drafter = copy.deepcopy(self.drafter)
            share = self.accelerator.process_index, self.accelerator.num_processes
        else:
            # Only the main process is given the whole of a drafter that is sharded.
            state_dict = self.accelerator.get_state_dict(self.model_wrapped)
            share = 0, 1
            if not self.accelerator.is_main_process:
                return None, *share
            drafter = type(self.drafter)(self.drafter.config)
            drafter.load_state_dict(_without_prefix(state_dict))
        return drafter.to(self.args.device, self.target.model.dtype).eval(), *share

    # ---- saving and loading

    def _save(self, output_dir=None, state_dict=None):
        if self.args.should_save:
            state_dict = _without_prefix(state_dict) if state_dict is not None else None
            self.drafter.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)

    def create_model_card(self, license=None, **kwargs):
        """The drafter's own card, see [`write_card`], for the Trainer's pushes too. A card by other hands stays."""
        if not self.is_world_process_zero():
            return
        about = {"target": self.target.model.config._name_or_path, "name": self.hub_model_id, "license": license}
        try:
            write_card(self.args.output_dir, curve=self.state.log_history, **about)
        except FileExistsError as error:
            logger.warning(f"The card was left as it is: {error}")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        drafter = self.drafter
        saved = type(drafter).from_pretrained(resume_from_checkpoint, dtype=drafter.dtype)
        drafter.load_state_dict(saved.state_dict())

    def _load_best_model(self):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def as_conversations(dataset, max_length: int, cache: FeatureCache | None):
    """Records as a data set; a dict of them as a dict of data sets; a data set, or None, as it is."""
    if isinstance(dataset, dict):
        return {name: as_conversations(part, max_length, cache) for name, part in dataset.items()}
    ready = dataset is None or isinstance(dataset, Conversations)
    return dataset if ready else Conversations(dataset, max_length, cache)


def _without_prefix(state_dict):
    return {name.removeprefix("drafter."): tensor for name, tensor in state_dict.items()}


def most_frequent_tokens(dataset: Conversations | None, count: int | None) -> torch.Tensor | None:
    """The tokens that the answers use most, for a restricted loss."""
    if dataset is None or count is None:
        return None
    answers = torch.cat([ids[mask] for ids, mask, _ in dataset.records])
    tokens, uses = answers.unique(return_counts=True)
    return tokens[uses.argsort(descending=True, stable=True)[:count]]


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint in a folder that is whole; one that was being written when the run was killed is not."""
    checkpoints = []
    for path in Path(folder).glob("checkpoint-*"):
        try:
            # The Trainer writes its state last.
            checkpoints.append((json.loads((path / "trainer_state.json").read_text())["global_step"], str(path)))
        except (OSError, ValueError, KeyError):
            continue
    return max(checkpoints)[1] if checkpoints else None
