"""The card of a drafter, and the way to the Hub for a folder that has one."""

import filecmp
import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from yaml import YAMLError

from .configuration_drafter import DrafterConfig
from .evaluation.prompts import SETS
from .modeling_domino import DominoDrafter
from .modeling_eagle3 import Eagle3Drafter
from .training.recipe import RECIPE_FILE, read_recipe, recipe_rows

METRICS = {
    "acceptance_length": "acceptance length",
    "base_acceptance_length": "of the base alone",
    "dflash_acceptance_length": "of DFlash",
    "speedup": "times as fast as plain decoding",
    "base_speedup": "the base alone",
    "dflash_speedup": "DFlash",
}
# Methods of `hf-domino bench` that stand on the card of a method, and what their metrics are called there.
_ON_CARD = {
    "domino": {"domino": "", "domino-base": "base_", "dflash": "dflash_"},
    "dflash": {"dflash": ""},
    "eagle3": {"eagle3": ""},
}
_KINDS = {kind.config_class.model_type: kind for kind in (DominoDrafter, Eagle3Drafter)}
_TRAINING_FILES = (RECIPE_FILE, "trainer_state.json")
_CURVE_ROWS = 12


def model_card(
    config: DrafterConfig,
    *,
    target: str,
    name: str = "drafter",
    revision: str | None = None,
    license: str | None = None,
    recipe: dict | None = None,
    curve: list[dict] | None = None,
    acceptance: dict | None = None,
    speed: dict | None = None,
    tags: list[str] | None = None,
) -> ModelCard:
    """The card of a drafter.

    Args:
        config: the drafter's.
        target, revision: model id of its target, and a commit or a tag of it.
        name: the drafter's own id, as the usage code names it.
        license: the drafter's, as the Hub spells it ("apache-2.0").
        recipe: what `hf-domino train` writes into training_recipe.json.
        curve: a Trainer's log history. Its evaluations are shown, and the last one stands with the acceptance.
        acceptance: for each set the acceptance length, or a dict of "acceptance_length" and, as known, other
            `METRICS`, "dataset" (its Hub id), and anything that says how it was measured.
        speed: for each set how many times as fast as plain decoding, or a dict of "speedup" and such.
        tags: for the Hub, beside the drafter's own.
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
        tags=["speculative-decoding", "hf_domino", config.method, *(tags or [])],
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    with torch.device("meta"):
        num_parameters = _KINDS[config.model_type](config).num_parameters()
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


def read_results(file: str | os.PathLike, config: DrafterConfig) -> dict:
    """What a result file says of a drafter: the arguments `acceptance` and `speed` of [`model_card`].

    Args:
        file: the result.json of `hf-domino bench`, or JSON of the form `{"acceptance": {...}, "speed": {...}}`.
        config: the drafter's.

    Raises:
        ValueError: the file holds something else, or measured another drafter.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no readable JSON file: {error}") from error
    if isinstance(found, dict) and found and not found.keys() - {"acceptance", "speed"}:
        return found
    if not isinstance(found, dict) or not isinstance(found.get("summary"), list):
        raise ValueError(
            f'{file} must be a result of `hf-domino bench`, or hold {{"acceptance": {{SET: ...}}, "speed": '
            "{SET: ...}}, or one of them."
        )
    methods = _ON_CARD[config.method]
    own = next(iter(methods))
    measured = found.get("drafters", {}).get(own, {})
    for name in ("block_size", "num_hidden_layers", "draft_vocabulary_size"):
        if name in measured and measured[name] != getattr(config, name, None):
            values = f"{name} {measured[name]}, not {getattr(config, name, None)}"
            raise ValueError(f"{file} measured another drafter: its {own} has {values}.")
    settings = found.get("settings", {})
    dflash = found.get("drafters", {}).get("dflash", {}).get("name") if own == "domino" else None
    how = {
        "decoding": {True: "sampled", False: "greedy"}.get(settings.get("do_sample")),
        "room": settings.get("max_new_tokens"),
        "dtype": measured.get("dtype"),
        "machine": found.get("machine", {}).get("device"),
        "dflash": Path(dflash).name if dflash and not _is_model_id(dflash) else dflash,
    }
    rows = {row["set"]: {"prompts": row.get("prompts")} for row in found["summary"] if row["method"] == own}
    for row in found["summary"]:
        if row["set"] in rows and row["method"] in methods:
            for metric in ("acceptance_length", "speedup"):
                rows[row["set"]][methods[row["method"]] + metric] = row.get(metric)
    rows = {title: {k: v for k, v in {**row, **how}.items() if v is not None} for title, row in rows.items()}
    rows = {title: row for title, row in rows.items() if METRICS.keys() & row.keys()}
    if not rows:
        raise ValueError(f"{file} has no measurement of the method {own}, which this drafter is.")
    for title, row in rows.items():
        if title in SETS:
            row["dataset"] = SETS[title].source
    return {"acceptance": rows}


def write_card(folder: str | os.PathLike, *, overwrite: bool = False, results=None, **about) -> Path:
    """Write the card of a saved drafter, README.md in its folder.

    Args:
        folder: where the drafter was saved.
        overwrite: also replace a card that hf_domino did not write, or that was edited since.
        results: a file with what was measured, see [`read_results`].
        about: as in [`model_card`]. What is not given is taken from what a training run left in the folder.

    Raises:
        FileExistsError: there is another card.
        ValueError: the folder holds no drafter, or nothing says what its target is.
    """
    folder = Path(folder)
    config, recipe = read_recipe(folder, "config.json"), read_recipe(folder)
    if (kind := _KINDS.get(config.get("model_type"))) is None:
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
    config = kind.config_class.from_dict(config)
    if results is not None:
        about |= read_results(results, config)
    path, old = folder / "README.md", _read_card(folder)
    if old is not None and not overwrite and not _is_ours(old):
        raise FileExistsError(f"{path} was not written by hf_domino, or was edited since; overwrite it if you mean to.")
    path.write_text(_marked(str(model_card(config, **about))), encoding="utf-8")
    return path


def push_folder(folder: str | os.PathLike, repo_id: str, *, private: bool | None = None, token=None, **kwargs):
    """Push a saved drafter with its card: `write_card(folder, name=repo_id)`, then this.

    Further arguments, result and errors are those of `huggingface_hub.HfApi.upload_folder`.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if (branch := kwargs.get("revision")) and not branch.startswith("refs/pr"):
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    files = ["README.md", "config.json", "*.safetensors", "*.safetensors.index.json", "*.py"]
    kwargs = {"allow_patterns": files, "ignore_patterns": "*/*", **kwargs}  # without a training run's checkpoints
    return api.upload_folder(folder_path=folder, repo_id=repo_id, **kwargs)


def push_drafter(
    drafter,
    repo_id: str,
    push,
    *,
    target: str | None = None,
    target_revision: str | None = None,
    license: str | None = None,
    acceptance: dict | None = None,
    speed: dict | None = None,
    results: str | os.PathLike | None = None,
    token=None,
    **kwargs,
):
    """What `drafter.push_to_hub(repo_id, ...)` does: push it, with a card where the Hub has none.

    A card that is there stays, unless one of the arguments about the drafter asks for a new one and nobody edited it.
    For a new card, the folder or repository that the drafter was loaded from says what is not given: target and
    licence, and where the weights are still the same, its recipe, its curve, what was measured, or the whole of a card
    that was edited there.

    Args:
        drafter, repo_id: what is pushed, and where to.
        push: transformers' own `push_to_hub`.
        target, target_revision: model id of its target, and a commit or a tag of it.
        license, acceptance, speed: as in [`model_card`].
        results: as in [`write_card`].
        token, kwargs: as in transformers' `push_to_hub`.

    Raises:
        FileExistsError: a new card was asked for, but the one that is there was edited.
        ValueError: nothing says what the drafter's target is on the Hub.
    """
    about = {
        "target": target,
        "revision": target_revision,
        "license": license,
        "acceptance": acceptance,
        "speed": speed,
        "results": results,
    }
    about = {name: value for name, value in about.items() if value is not None}
    if "/" not in repo_id:  # the Hub says whose it is
        repo_id = HfApi(token=token).create_repo(repo_id, private=kwargs.get("private"), exist_ok=True).repo_id
    on_hub = _card_on_hub(repo_id, token)
    if on_hub is not None and not about:
        return push(repo_id, token=token, **kwargs)
    if on_hub is not None and not _is_ours(on_hub):
        raise FileExistsError(f"The card of {repo_id} is not hf_domino's own, or was edited: edit it there.")
    shards = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
    tags = kwargs.pop("tags", None)
    with TemporaryDirectory() as folder:
        drafter.save_pretrained(folder, **shards)
        known = _known_of(drafter, Path(folder), token)
        if on_hub is not None:
            known = {**known, **_facts(on_hub, "target", "license")}
        edited = _read_card(Path(folder))
        if edited is not None and about:
            raise FileExistsError(f"The card in {drafter.config._name_or_path} was edited: edit it there, and push it.")
        if edited is None:
            if not _is_model_id(known.get("target", "")):  # a folder on this machine is nothing to a stranger
                known.pop("target", None)
            about = {**known, **about, "tags": [tags] if isinstance(tags, str) else tags}
            if not about.get("target"):
                raise ValueError(f"Nothing says which target it is for: push_to_hub({repo_id!r}, target=...).")
            write_card(folder, name=repo_id, **about)
        return push_folder(folder, repo_id, token=token, **{"commit_message": "Upload drafter", **kwargs})


def _known_of(drafter, folder: Path, token) -> dict:
    """What the place that a drafter was loaded from says of it; puts what still holds into `folder`, its copy."""
    name = drafter.config._name_or_path
    if not name:
        return {}
    source = Path(name)
    if not source.is_dir():
        card = _card_on_hub(name, token) if "/" in name and _is_model_id(name) else None
        return {} if card is None else _facts(card, "target", "license")
    card, options = _read_card(source), read_recipe(source).get("options", {})
    known = {fact: options[fact] for fact in ("target", "license") if options.get(fact)}
    is_same = all(
        (source / file.name).is_file() and filecmp.cmp(file, source / file.name, shallow=False)
        for file in folder.glob("*.safetensors")
    )
    if is_same:
        for file in (source / name for name in _TRAINING_FILES):
            if file.is_file():
                shutil.copy(file, folder)
        if card is not None and not _is_ours(card):
            shutil.copy(source / "README.md", folder)
    wanted = ("target", "license", "acceptance") if is_same else ("target", "license")
    return known if card is None else {**known, **_facts(card, *wanted)}


def _facts(card: str, *names: str) -> dict:
    """These of the facts that a card holds in its head: target, license, acceptance (whatever was measured)."""
    try:
        data = ModelCard(card).data
    except (ValueError, YAMLError):  # not made for reading
        return {}
    rows = {}
    for result in data.eval_results or []:
        if result.metric_type in METRICS:
            row = rows.setdefault(result.dataset_name, {"dataset": result.dataset_type, **(result.metric_args or {})})
            row[result.metric_type] = result.metric_value
    target = data.base_model[0] if isinstance(data.base_model, list) and data.base_model else data.base_model
    facts = {"target": target, "license": data.license, "acceptance": rows}
    return {name: facts[name] for name in names if facts[name]}


def _card_on_hub(repo_id: str, token) -> str | None:
    api = HfApi(token=token)
    if not api.file_exists(repo_id, "README.md"):
        return None
    return Path(api.hf_hub_download(repo_id, "README.md")).read_text(encoding="utf-8", errors="replace")


def _read_card(folder: Path) -> str | None:
    path = folder / "README.md"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _is_model_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _is_ours(card: str) -> bool:
    """Whether hf_domino wrote a card and nobody edited it since."""
    return card == _marked(card.rpartition("\n<!--")[0])


def _marked(text: str) -> str:
    """A card with a last line by which it is known again, as long as nobody edits it."""
    return f"{text}\n<!-- Written by hf_domino: {hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"
