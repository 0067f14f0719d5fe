"""hf-domino: the package's work from the command line.

    hf-domino demo                                               a prompt without and with a drafter, side by side
    hf-domino regenerate --target T --prompts P --out FOLDER     the target answers prompts: training data
    hf-domino train --target T --data FOLDER --out FOLDER        a drafter from that data
    hf-domino doctor --target T --drafter D                      why a drafter is hardly ever accepted
    hf-domino bench --target T --drafter D --out FOLDER          what the drafter gains, against plain and its peers
    hf-domino report JSON [JSON ...] --out FOLDER                the table and plots of one or several benches
    hf-domino card --drafter FOLDER                              its card for the Hub, written or refreshed

Every argument may also stand in a YAML file, `--config FILE`; the command line wins. What stands in front of the first
option is the command's first argument.
"""

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from .demo import DemoOptions, run_demo
from .evaluation.benchmark import BenchOptions, run_bench
from .evaluation.doctor import NEAR_ONE, PROMPTS, diagnose
from .evaluation.report import ReportOptions, run_report
from .hub import write_card
from .modeling_domino import DominoDrafter
from .modeling_eagle3 import Eagle3Drafter
from .target import Target
from .training.data import SETTINGS_FILE, load_conversations, read_prompts, regenerate
from .training.features import Conversations, cache_features
from .training.recipe import check_recipe, make_recipe, write_recipe
from .training.trainer import DominoTrainer, DominoTrainingArguments, last_checkpoint, most_frequent_tokens


def _option(default=dataclasses.MISSING, help=""):
    return field(default=default, metadata={"help": help})


@dataclass
class RegenerateOptions:
    """Let a target answer prompts. A run that was killed goes on when the same command is given again."""

    target: str = _option(help="The target: a folder or a model on the Hub.")
    prompts: str = _option(help="A JSONL or Parquet file, or a data set on the Hub.")
    out: str = _option(help="The folder of conversations.")
    split: str = _option("train", help='Which rows of the prompts; "train[:100]" is the first hundred.')
    subset: str | None = _option(None, help="Configuration of a data set on the Hub.")
    column: str | None = _option(None, help="Column that holds the prompts. Default: the first known one.")
    max_new_tokens: int = _option(512, help="Room for each answer.")
    do_sample: bool = _option(False, help="Sample the answers. Default: greedy ones.")
    temperature: float | None = _option(None, help="Default: the target's own.")
    top_p: float | None = _option(None, help="Default: the target's own.")
    top_k: int | None = _option(None, help="Default: the target's own.")
    num_samples: int = _option(1, help="Answers to each prompt, when sampling.")
    seed: int = _option(0, help="Of the samples.")
    enable_thinking: bool | None = _option(None, help="For chat templates that know it.")
    batch_size: int = _option(16, help="Prompts answered at once.")
    dtype: str = _option("auto", help="Of the target.")
    device: str | None = _option(None, help="Of the target. Default: the first accelerator, else the CPU.")


@dataclass
class TrainOptions:
    """Train a drafter. A run that was killed goes on from its last checkpoint when the same command is given again."""

    target: str = _option(help="The target: a folder or a model on the Hub.")
    data: str = _option(help="A folder that `hf-domino regenerate` wrote.")
    out: str = _option(help="Where checkpoints and the finished drafter go.")
    method: str = _option("domino", help='"domino" (DFlash with --head none), or "eagle3".')
    init_from: str | None = _option(None, help="A drafter of the same kind to start from.")
    from_target: bool = _option(
        False, help="Start the layers as copies of the target's own last ones; EAGLE-3's head always starts as its."
    )
    cache_features: str | None = _option(None, help="A folder to keep the target's features in, for every epoch.")
    eval_size: int = _option(32, help="Conversations held out, whole prompts at a time, to measure acceptance on.")
    dtype: str = _option("auto", help="Of the target.")
    save_dtype: str = _option("bfloat16", help="Of the finished drafter.")
    attn_implementation: str = _option("sdpa", help="The drafter's attention: sdpa, eager or flex_attention.")
    head: str | None = _option(None, help='"domino", or "none" for a DFlash drafter.')
    block_size: int | None = _option(None, help="Slots of a block, the anchor included.")
    sample_from_anchor: bool | None = _option(None, help="Whether the anchor's slot drafts too.")
    num_draft_tokens: int | None = _option(None, help="Tokens that an EAGLE-3 drafter drafts in a round.")
    num_uncorrected_tokens: int | None = _option(None, help="First drafts of a block without correction.")
    num_hidden_layers: int | None = _option(None, help="Layers of the drafter.")
    target_layer_ids: list[int] | None = _option(None, help="Target layers whose outputs are the features.")
    intermediate_size: int | None = _option(None, help="Width inside the drafter's MLPs.")
    causal_state_size: int | None = _option(None, help="Width of the head's causal state.")
    correction_rank: int | None = _option(None, help="Rank of the head's correction.")
    mask_token_id: int | None = _option(None, help="Default: an id that the target never emits.")
    draft_vocabulary_size: int | None = _option(
        None, help="Let the finished drafter draft only so many tokens, the most frequent ones of the answers."
    )
    num_correction_candidates: int | None = _option(None, help="Tokens of a slot that the head corrects. Default: all.")
    license: str | None = _option(None, help='Of the drafter, for its card: "apache-2.0".')


@dataclass
class CardOptions:
    """Write the README.md of a saved drafter anew, from what its folder and these arguments say."""

    drafter: str = _option(help="The drafter's folder.")
    target: str | None = _option(None, help="Its target on the Hub. Default: the one it was trained for.")
    revision: str | None = _option(None, help="The target's, a commit or a tag.")
    name: str | None = _option(None, help="The drafter's id on the Hub. Default: the folder's name.")
    license: str | None = _option(None, help='Of the drafter: "apache-2.0".')
    results: str | None = _option(
        None, help='result.json of `hf-domino bench`, or {"acceptance": {SET: 2.9, ...}, "speed": {SET: 1.5, ...}}.'
    )
    overwrite: bool = _option(False, help="Also replace a card that was written or edited by hand.")


@dataclass
class DoctorOptions:
    """Check a target and a drafter against each other, measure acceptance, and where it is low look for the cause.

    The exit status is 1 where something is wrong.
    """

    target: str = _option(help="The target: a folder or a model on the Hub.")
    drafter: str = _option(help="The drafter: a folder or a model on the Hub.")
    prompts: str | None = _option(None, help="A JSONL or Parquet file, or a data set on the Hub. Default: a few own.")
    num_prompts: int = _option(4, help="How many of them.")
    max_new_tokens: int = _option(48, help="Room for each answer.")
    probe_below: float = _option(NEAR_ONE, help="Look for the cause at an acceptance length below this one.")
    enable_thinking: bool | None = _option(None, help="For chat templates that know it.")
    dtype: str = _option("auto", help="Of both.")
    device: str | None = _option(None, help="Of both. Default: the first accelerator, else the CPU.")


# Of each method: its drafter, and the options that are fields of its configuration.
_METHODS = {
    method: (kind, {f.name for f in dataclasses.fields(TrainOptions)} & kind.config_class.own_fields() - {"dtype"})
    for method, kind in {"domino": DominoDrafter, "eagle3": Eagle3Drafter}.items()
}


def run_regenerate(options: RegenerateOptions) -> None:
    own = dataclasses.asdict(options)
    name, out, dtype, device = (own.pop(key) for key in ("target", "out", "dtype", "device"))
    source, *where = (own.pop(key) for key in ("prompts", "split", "subset", "column"))
    prompts = read_prompts(source, *where)
    tokenizer = AutoTokenizer.from_pretrained(name)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device or accelerator)
    print(f"{regenerate(target, tokenizer, prompts, out, **own)} conversations were added to {out}.")


def run_train(options: TrainOptions, args: DominoTrainingArguments) -> None:
    args.output_dir = options.out
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    records = list(load_conversations(options.data, tokenizer))
    train_records, eval_records = hold_out(records, options.eval_size)
    answers = json.loads((Path(options.data) / SETTINGS_FILE).read_text(encoding="utf-8"))["settings"].get("generation")
    recipe = make_recipe(dataclasses.asdict(options), args, len(records), len(eval_records), answers)
    checkpoint = args.resume_from_checkpoint or last_checkpoint(options.out)
    if checkpoint:
        check_recipe(Path(checkpoint).parent, recipe)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).to(args.device)
    set_seed(args.seed)
    drafter = new_drafter(options, target, tokenizer, train_records)
    drafter.set_attn_implementation(options.attn_implementation)
    cache = None
    if options.cache_features:
        needs_last_hidden = bool(args.soft_target_weight or args.total_variation_weight)
        with args.main_process_first(local=False):
            cache = cache_features(
                Target(target.eval()),
                records,
                drafter.config.feature_layers(Target(target).config.num_hidden_layers),
                options.cache_features,
                last_hidden=needs_last_hidden,
                max_length=args.max_length,
                progress=args.process_index == 0,
            )
    if not eval_records:
        args.eval_strategy = "no"
    trainer = DominoTrainer(drafter, target, args, train_records, eval_records or None, cache)
    recipe["data"]["without_anchor"] = trainer.train_dataset.num_skipped
    recipe["target_revision"] = getattr(target.config, "_commit_hash", None)
    if trainer.is_world_process_zero():
        write_recipe(Path(options.out), recipe)
    trainer.train(resume_from_checkpoint=checkpoint)
    if eval_records:
        trainer.evaluate()
    if options.draft_vocabulary_size and options.method == "domino":  # whose training needs every token
        vocabulary = most_frequent_tokens(trainer.train_dataset, options.draft_vocabulary_size)
        trainer.drafter.set_draft_vocabulary(vocabulary)
    trainer.drafter.to(getattr(torch, options.save_dtype))
    trainer.save_state()  # trainer_state.json holds the curve
    trainer.save_model()
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        print(f"The drafter is in {options.out}.")


def run_card(options: CardOptions) -> None:
    about = dataclasses.asdict(options)
    print(f"The card is {write_card(about.pop('drafter'), **about)}.")


def run_doctor(options: DoctorOptions) -> None:
    prompts = (read_prompts(options.prompts) if options.prompts else PROMPTS)[: options.num_prompts]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    models = [
        kind.from_pretrained(name, dtype=options.dtype).to(options.device or accelerator).eval()
        for kind, name in ((AutoModelForCausalLM, options.target), (DominoDrafter, options.drafter))
    ]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    diagnosis = diagnose(
        *models, tokenizer, prompts, options.max_new_tokens, options.enable_thinking, options.probe_below
    )
    print(diagnosis)
    sys.exit(0 if diagnosis.is_healthy else 1)


def new_drafter(options: TrainOptions, target, tokenizer, records) -> DominoDrafter | Eagle3Drafter:
    """The drafter that training starts from, in float32.

    Raises:
        ValueError: there is no such method, an option belongs to another one, or two say where weights come from.
    """
    if options.method not in _METHODS:
        raise ValueError(f"--method is {options.method!r}, but must be one of {', '.join(_METHODS)}.")
    kind, names = _METHODS[options.method]
    others = set.union(*(fields for _, fields in _METHODS.values())) - names
    if foreign := sorted(name for name in others if getattr(options, name) is not None):
        raise ValueError(f"--{' and --'.join(foreign)} can't be given with --method {options.method}.")
    if options.init_from and options.from_target:
        raise ValueError("--init_from and --from_target both say where the weights come from: give one.")
    fields = {name: value for name in names if (value := getattr(options, name)) is not None}
    # A Domino drafter is trained on every token, and an EAGLE-3 drafter that there is keeps its own.
    vocabulary_size = None if options.init_from else fields.pop("draft_vocabulary_size", None)
    if options.method == "domino":
        fields.pop("draft_vocabulary_size", None)
    if options.init_from:
        return kind.from_pretrained(options.init_from, dtype=torch.float32, **fields)
    if options.method == "eagle3":
        vocabulary = most_frequent_tokens(Conversations(records), vocabulary_size)
        return kind.from_target(target, vocabulary, **fields)
    if options.from_target:
        return kind.from_target(target, tokenizer, **fields)
    return kind(kind.config_class.for_target(target.config, tokenizer, **fields))


def hold_out(records: list[dict], count: int) -> tuple[list[dict], list[dict]]:
    """Split off at least `count` records (if there are others), all samples of a prompt on the same side.

    Which prompts are held out depends on the prompts alone, so that it stays when data is added.
    """
    prompts: dict[str, list[dict]] = {}
    for record in records:
        prompts.setdefault(record["key"], []).append(record)
    train, held = [], []
    for key in sorted(prompts, key=lambda key: hashlib.sha256(key.encode()).digest()):
        (held if len(held) < count else train).extend(prompts[key])
    if not train:
        raise ValueError(f"Holding out {count} of {len(records)} conversations leaves none to train on.")
    return train, held


# ---- the command line

_COMMANDS = {
    "demo": (run_demo, [DemoOptions], {}),
    "regenerate": (run_regenerate, [RegenerateOptions], {}),
    # Loss and acceptance are worth seeing more often than every 500 steps.
    "train": (run_train, [TrainOptions, DominoTrainingArguments], {"eval_strategy": "epoch", "logging_steps": 10}),
    "doctor": (run_doctor, [DoctorOptions], {}),
    "bench": (run_bench, [BenchOptions], {}),
    "report": (run_report, [ReportOptions], {}),
    "card": (run_card, [CardOptions], {}),
}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in _COMMANDS:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        print(__doc__ if asked else f"usage: hf-domino {{{','.join(_COMMANDS)}}} --help", file=sys.stderr)
        sys.exit(0 if asked else 2)
    run, options, defaults = _COMMANDS[argv[0]]
    parser = HfArgumentParser(options, prog=f"hf-domino {argv[0]}", description=options[0].__doc__, allow_abbrev=False)
    if argv[1:] and not argv[1].startswith("-"):
        argv = [argv[0], f"--{dataclasses.fields(options[0])[0].name}", *argv[1:]]
    parser.add_argument("--config", help="A YAML file with any of these arguments.")
    parser.set_defaults(**defaults)
    try:
        *parsed, namespace = parser.parse_args_into_dataclasses(_with_config(argv[1:]), look_for_args_file=False)
        run(*parsed)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"hf-domino: {error}")


def _with_config(argv: list[str]) -> list[str]:
    """The arguments of the YAML file that `--config` names, in front of those given: the last one wins."""
    files = [value for name, value in zip(argv, argv[1:]) if name == "--config"]
    files += [name.split("=", 1)[1] for name in argv if name.startswith("--config=")]
    if not files:
        return argv
    import yaml

    try:
        settings = yaml.safe_load(Path(files[-1]).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{files[-1]} is no readable YAML file: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{files[-1]} must hold argument names and their values.")
    arguments = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            values = [json.dumps(value) if isinstance(value, dict) else str(value) for value in values]
            arguments += [f"--{str(name).replace('-', '_')}", *values]
    return arguments + argv


if __name__ == "__main__":
    main()
