"""Prompt sets to measure on: the usual ones by name, from the Hub, or any file."""

from collections import namedtuple
from pathlib import Path

from ..training.data import FILE_BUILDERS, read_prompts

# `template` makes the user's message of a row; without one the row's `prompt` is the list of the user's turns.
HubSet = namedtuple("HubSet", "source subset split template")
STEPS = "Please reason step by step, and put your final answer within \\boxed{{}}."
SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "{question}\n" + STEPS),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", "{problem}\n" + STEPS),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", "{prompt}"),
    "mbpp": HubSet("google-research-datasets/mbpp", "full", "test", "{text}"),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", None),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", "{instruction}\n\n{input}"),
}


def read_set(source: str) -> tuple[str, list[list[dict]]]:
    """A prompt set's name and its conversations, each a list of system and user messages.

    Args:
        source: a name in `SETS`; a JSONL or Parquet file, named after itself; or NAME=FILE.

    Raises:
        FileNotFoundError, ValueError: no such set or file, or nothing usable in it.
    """
    if source in SETS:
        return source, read_hub_set(*SETS[source])
    name, _, path = source.rpartition("=")
    if Path(path).suffix not in FILE_BUILDERS:
        raise ValueError(f"{source!r} is no prompt set: give one of {', '.join(SETS)}, a file, or NAME=FILE.")
    return name or Path(path).stem, read_prompts(path)


def read_hub_set(source, subset, split, template) -> list[list[dict]]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Reading prompts needs the package datasets (pip install datasets).") from error
    conversations = []
    for row in datasets.load_dataset(source, subset, split=split):
        turns = row["prompt"] if template is None else [template.format(**row).strip()]
        conversations.append([{"role": "user", "content": turn} for turn in turns])
    return conversations


def spread(items: list, count: int | None) -> list:
    """`count` of the items at even distances: sets are often sorted by subject. None, or too many, means all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
