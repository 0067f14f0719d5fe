"""The card of a drafter, and the way to the Hub for a folder that has one."""

import hashlib
import os
from pathlib import Path

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .configuration_domino import DominoConfig
from .modeling_domino import DominoDrafter
from .training.recipe import read_recipe, recipe_rows

METRICS = {
    "acceptance_length": "acceptance length",
    "base_acceptance_length": "of the base alone",
    "speedup": "times as fast as plain decoding",
}
_CURVE_ROWS = 12


def model_card(
    config: DominoConfig,
    *,
    target: str,
    name: str = "drafter",
    revision: str | None = None,
    license: str | None = None,
    recipe: dict | None = None,
    curve: list[dict] | None = None,
    acceptance: dict | None = None,
    speed: dict | None = None,
) -> ModelCard:
    """The card of a drafter.

    Args:
        config: the drafter's.
        target, revision: model id of its target, and a commit or a tag of it.
        name: the drafter's own id, as the usage code names it.
        license: the drafter's, as the Hub spells it ("apache-2.0").
        recipe: what `hf-domino train` writes into training_recipe.json.
        curve: a Trainer's log history. Its evaluations are shown, and the last one stands with the acceptance.
        acceptance: for each set the acceptance length, or a dict of "acceptance_length" and, as known,
            "base_acceptance_length", "dataset" (its Hub id), and anything that says how it was measured.
        speed: for each set how many times as fast as plain decoding, or a dict of "speedup" and such.
    """
    walks = list({entry["step"]: entry for entry in curve or [] if "eval_base_acceptance_length" in entry}.values())
    rows = {}
    if walks:
        lengths = {metric: walks[-1][f"eval_{metric}"] for metric in METRICS if f"eval_{metric}" in walks[-1]}
        rows["held-out conversations"] = {**lengths, "by": "a walk through the target's answers"}
    for metric, results in (("acceptance_length", acceptance), ("speedup", speed)):
        for title, result in (results or {}).items():
            rows.setdefault(title, {}).update(result if isinstance(result, dict) else {metric: result})
    evaluations = []
    for title, row in rows.items():
        dataset = row.pop("dataset", title)
        how = {key: value for key, value in row.items() if key not in METRICS}
        values = {metric: row[metric] for metric in METRICS if metric in row}
        if not values or not all(isinstance(value, int | float) for value in values.values()):
            raise ValueError(f"What was measured on {title} must be numbers, {' or '.join(METRICS)}, not {row}.")
        for metric, value in values.items():
            about = (dataset, title, metric, round(value, 3))
            evaluations.append(EvalResult("text-generation", *about, metric_args=how or None))
        row["how"] = ", ".join(f"{key} {value}" for key, value in how.items())
    data = ModelCardData(
        base_model=target if _is_model_id(target) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        tags=["speculative-decoding", "hf_domino", "domino" if config.head == "domino" else "dflash"],
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    with torch.device("meta"):
        num_parameters = DominoDrafter(config).num_parameters()
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card_template.md")),
        **dict(name=name, target=target, revision=revision, license=license, num_parameters=num_parameters),
        config=config,
        dtype=str(config.dtype or "").removeprefix("torch."),
        rows=rows,
        columns=[metric for metric in METRICS if any(metric in row for row in rows.values())],
        titles=METRICS,
        recipe=recipe_rows(recipe or {}),
        curve=walks[:: -1 - len(walks) // _CURVE_ROWS][::-1],  # so many at most, the last one among them
    )


def write_card(folder: str | os.PathLike, *, overwrite: bool = False, **about) -> Path:
    """Write the card of a saved drafter, README.md in its folder.

    Args:
        folder: where the drafter was saved.
        overwrite: also replace a card that hf_domino did not write, or that was edited since.
        about: as in [`model_card`]. What is not given is taken from what a training run left in the folder.

    Raises:
        FileExistsError: there is another card.
        ValueError: the folder holds no drafter, or nothing says what its target is.
    """
    folder = Path(folder)
    config, recipe = read_recipe(folder, "config.json"), read_recipe(folder)
    if config.get("model_type") != DominoConfig.model_type:
        raise ValueError(f"{folder} holds no drafter that hf_domino saved.")
    known = {"recipe": recipe, "curve": read_recipe(folder, "trainer_state.json").get("log_history")}
    known |= {name: recipe.get("options", {}).get(name) for name in ("target", "license")}
    about = {**known, "name": folder.resolve().name} | {
        name: value for name, value in about.items() if value is not None
    }
    if not about["target"]:
        raise ValueError(f"{folder} does not say which target the drafter is for: name it.")
    if about["target"] == known["target"]:
        about.setdefault("revision", recipe.get("target_revision"))
    path = folder / "README.md"
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if old is not None and not overwrite and old != _marked(old.rpartition("\n<!--")[0]):
        raise FileExistsError(f"{path} was not written by hf_domino, or was edited since; overwrite it if you mean to.")
    path.write_text(_marked(str(model_card(DominoConfig.from_dict(config), **about))), encoding="utf-8")
    return path


def push_folder(folder: str | os.PathLike, repo_id: str, *, private: bool | None = None, token=None, **kwargs):
    """Push a saved drafter with its card: `write_card(folder, name=repo_id)`, then this.

    `drafter.push_to_hub(repo_id)` keeps the card that is on the Hub already and never takes one from a folder: it is
    for later pushes. Further arguments, result and errors are those of `huggingface_hub.HfApi.upload_folder`.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    files = ["README.md", "config.json", "*.safetensors", "*.safetensors.index.json", "*.py"]
    kwargs = {"allow_patterns": files, "ignore_patterns": "*/*", **kwargs}  # without a training run's checkpoints
    return api.upload_folder(folder_path=folder, repo_id=repo_id, **kwargs)


def _is_model_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _marked(text: str) -> str:
    """A card with a last line by which it is known again, as long as nobody edits it."""
    return f"{text}\n<!-- Written by hf_domino: {hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"
