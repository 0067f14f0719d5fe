"""What a training run is made of: recorded at its start, held to when it goes on, shown on the drafter's card."""

import json
from pathlib import Path

from ..configuration_drafter import abridged

RECIPE_FILE = "training_recipe.json"
# The training arguments that decide what comes out; the others say where, how often and how fast.
_ARGUMENTS = (
    "num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay optim "
    "optim_args adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 seed data_seed max_length num_anchors "
    "lambda_start lambda_share decay soft_target_weight total_variation_weight loss_vocabulary_size"
).split()
# The options of `hf-domino train` that may differ when a run goes on.
_FREE_OPTIONS = ("out", "cache_features", "save_dtype", "attn_implementation", "license")
# What the card says of how the answers were generated.
_ANSWERS = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * processes"


def make_recipe(options: dict, args, conversations: int, held_out: int, answers: dict | None = None) -> dict:
    """The recipe of a run: `hf-domino train`'s options, the training arguments, its data and how that was generated.

    Where it starts from a drafter in a folder, the recipe of that one's own training comes along.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    data = {"conversations": conversations, "held_out": held_out}
    return {
        "options": options,
        "arguments": args.to_sanitized_dict(),
        "data": data,
        "answers": answers,
        "sequences_per_step": batch,
        "before": read_recipe(Path(options["init_from"])) if options.get("init_from") else {},
    }


def check_recipe(folder: Path, recipe: dict) -> None:
    """Refuse to go on with the run in a folder under another recipe than the one it was started with.

    Raises:
        ValueError: something that decides what comes out was changed; the message names it with both values.
    """
    before, now = _what_decides(read_recipe(folder)), _what_decides(recipe)
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if changed:
        shown = "; ".join(f"{name} was {abridged(before[name])}, now {abridged(now[name])}" for name in changed)
        raise ValueError(
            f"The run in {folder} was started with another recipe: {shown}. Give the same arguments to go on with it, "
            "or another output folder to start anew."
        )


def read_recipe(folder: Path, file: str = RECIPE_FILE) -> dict:
    """A JSON file of a drafter's folder; {} where there is none."""
    return json.loads((folder / file).read_text(encoding="utf-8")) if (folder / file).is_file() else {}


def write_recipe(folder: Path, recipe: dict) -> None:
    unfinished = folder / f"{RECIPE_FILE}.unfinished"
    unfinished.write_text(json.dumps(recipe, indent=2, default=str), encoding="utf-8")
    unfinished.replace(folder / RECIPE_FILE)


def recipe_rows(recipe: dict) -> dict:
    """What a reader of the card needs to train the drafter again, name by name."""
    options, arguments = recipe.get("options", {}), recipe.get("arguments", {})
    rows = {name: options.get(name) for name in ("method", "init_from", "from_target")}
    rows |= {name: arguments.get(name) for name in _ARGUMENTS}
    rows["num_train_epochs" if arguments.get("max_steps", -1) > 0 else "max_steps"] = None
    # The Trainer writes what is not set as text.
    rows = {name: value for name, value in rows.items() if str(value) not in ("None", "", "{}", "False")}
    data = {name.replace("_", " "): value for name, value in recipe.get("data", {}).items()}
    answers = recipe.get("answers") or {}
    data |= {f"answers: {name}": answers[name] for name in _ANSWERS if answers.get(name) is not None}
    batch = {"sequences a step": recipe["sequences_per_step"]} if "sequences_per_step" in recipe else {}
    before = recipe_rows(recipe["before"]) if recipe.get("before") else {}
    return data | batch | rows | {f"before: {name}": value for name, value in before.items()}


def _what_decides(recipe: dict) -> dict:
    options = {name: value for name, value in recipe.get("options", {}).items() if name not in _FREE_OPTIONS}
    arguments = {name: value for name, value in recipe.get("arguments", {}).items() if name in _ARGUMENTS}
    data = {name: value for name, value in recipe.get("data", {}).items() if name in ("conversations", "held_out")}
    batch = {_BATCH: recipe["sequences_per_step"]} if "sequences_per_step" in recipe else {}
    return options | arguments | data | batch
