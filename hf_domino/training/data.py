"""The text a drafter learns from: prompts in, the target's own answers out, one folder of token ids with loss masks.

    read_prompts    JSONL, Parquet or a Hub dataset -> conversations (system and user messages)
    regenerate      the target answers every user turn -> OUT/conversations.jsonl and OUT/settings.json
    import_answers  answers that exist already as token ids -> the same folder
    load_conversations  the folder -> checked records

A record is one line: `key` (of the prompt; the samples of a prompt share it), `sample`, `part` and `num_parts`,
`input_ids`, `loss_mask` (1 where the target emitted the token), `finish_reason` ("stop" or "length") and `settings`,
the fingerprint of how it was made, written out in settings.json.
"""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jinja2 import TemplateError
from tqdm.auto import tqdm

from ..target import Target

logger = logging.getLogger(__name__)

CONVERSATIONS_FILE = "conversations.jsonl"
SETTINGS_FILE = "settings.json"
PROMPT_COLUMNS = ("messages", "conversations", "turns", "question", "prompt", "text")
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TOKENIZER_PROBE = "In 2024, 17% of naïve users\n\tsaid: 'I've 3 cats'  😀"


# ---- prompts


def read_prompts(
    source: str | os.PathLike, split: str = "train", subset: str | None = None, column: str | None = None
) -> list[list[dict]]:
    """Read conversations from a JSONL or Parquet file, or from a dataset on the Hub.

    Args:
        source: a file, or the name of a Hub dataset.
        split: which split, in the language of `datasets`: "train[:100]" is the first hundred rows, also of a file.
        subset: the Hub dataset's configuration.
        column: where the prompt is; by default the first filled one of `PROMPT_COLUMNS` in each row. It may hold a
            string, a list of strings (the user's turns) or a list of messages ({"role", "content"}, or ShareGPT's
            {"from", "value"}).

    Returns:
        A list of conversations, each a list of {"role", "content"} messages. Only system and user messages are kept:
        the target answers anew.

    Raises:
        FileNotFoundError, ValueError: the file is missing, unreadable or empty, or a row has no usable prompt.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Reading prompts needs the package datasets (pip install datasets).") from error

    builder = FILE_BUILDERS.get(Path(source).suffix)
    if builder is None:
        rows = datasets.load_dataset(str(source), subset, split=split)
    elif not Path(source).is_file():
        raise FileNotFoundError(f"There is no prompt file {source}.")
    else:
        try:
            rows = datasets.load_dataset(builder, data_files=str(source), split=split)
        except StopIteration:  # what `datasets` does with an empty file
            rows = []
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"{source} is no readable {builder} file: {error.__cause__ or error}") from error
    names = (f"{source}, row {index}" for index in itertools.count())
    prompts = [_conversation(_prompt_of(row, column, name), name) for row, name in zip(rows, names)]
    if not prompts:
        raise ValueError(f"{source} holds no prompts.")
    return prompts


def _prompt_of(row: dict, column: str | None, where: str):
    columns = (column,) if column is not None else PROMPT_COLUMNS
    for name in columns:
        if row.get(name):  # datasets fills the columns that a row lacks with None
            return row[name]
    raise ValueError(f"{where}: no prompt in {' / '.join(columns)}; the columns are {', '.join(row)}.")


def _conversation(prompt: str | list, where: str) -> list[dict]:
    """The system and user messages up to the last user message, in {"role", "content"} form."""
    messages = []
    for turn in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(turn, str):
            turn = {"role": "user", "content": turn}
        role = turn.get("role") or turn.get("from")
        role = SHAREGPT_ROLES.get(role, role)
        content = turn.get("content") or turn.get("value")
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: the role {role!r} is none of system, user and assistant.")
        if role == "assistant":
            continue
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{where}: a {role} message has no text.")
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError(f"{where}: there is no user message to answer.")
    return messages


# ---- the target's answers


def regenerate(
    target,
    tokenizer,
    prompts: str | os.PathLike | Iterable[list[dict]],
    out: str | os.PathLike,
    *,
    max_new_tokens: int = 512,
    do_sample: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    num_samples: int = 1,
    seed: int = 0,
    enable_thinking: bool | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> int:
    """Let the target answer every user turn of every prompt, and append the conversations to a folder.

    The answer to a turn is in the context of the next one, rendered by the target's chat template. A run that was
    killed goes on where it stopped when it is called again with the same settings; prompts and samples may be added.

    Args:
        target: a causal language model, on its device and in the dtype that it will be served in; put into eval mode.
        tokenizer: its tokenizer, with its chat template.
        prompts: what `read_prompts` returns, or a file or dataset that it reads. Repeated prompts are answered once.
        out: the folder.
        max_new_tokens: room for each answer; an answer that fills it is kept, cut.
        do_sample, temperature, top_p, top_k: as in `generate()`; None means what `target.generate()` does by itself,
            which is top_k 50 where its generation config has none. top_k 0 turns it off.
        num_samples: answers to each prompt, when sampling.
        seed: of the samples. It sets torch's global seed, batch by batch.
        enable_thinking: handed to the chat template; None leaves it to the template's own default.
        batch_size: answers generated at once, of prompts about equally long. May differ when a run goes on.
        progress: show a progress bar.

    Returns:
        How many conversations this call added.

    Raises:
        ValueError: prompts, chat template, tokenizer or settings that don't fit, before anything is generated.
        OSError: the folder can't be written; what it holds stays valid and the run can go on.
    """
    if num_samples > 1 and not do_sample:
        raise ValueError(f"Greedy answers are all alike: num_samples={num_samples} needs do_sample=True.")
    if isinstance(prompts, (str, os.PathLike)):
        prompts = read_prompts(prompts)
    chat = ChatFormat(tokenizer, enable_thinking)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if do_sample else {}
    answerer = Answerer(
        target,
        tokenizer,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        **{name: value for name, value in sampling.items() if value is not None},
    )
    dialogues = _dialogues(prompts, num_samples, chat, answerer)
    settings = {
        "target": target_fingerprint(target),
        "dtype": str(target.dtype),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "generation": answerer.settings(),
        "enable_thinking": enable_thinking,
        "seed": seed if do_sample else None,
        "vocab_size": answerer.target.config.vocab_size,
    }
    folder = ConversationFolder(out, settings, description={"target": target.config._name_or_path})
    to_do = [dialogue for dialogue in dialogues if dialogue.identity not in folder.finished]
    with tqdm(total=len(dialogues), initial=len(dialogues) - len(to_do), unit="conv", disable=not progress) as bar:
        for start in range(0, len(to_do), batch_size):
            batch = to_do[start : start + batch_size]
            if do_sample:
                torch.manual_seed(_seed(seed, batch[0].identity))
            _answer_all_turns(batch, chat, answerer)
            folder.append(dialogue.records() for dialogue in batch)
            bar.update(len(batch))
    return len(to_do)


def _dialogues(prompts, num_samples, chat, answerer) -> list["Dialogue"]:
    """One dialogue a prompt and sample, the longest prompts first: if memory runs out, it does so at the start."""
    conversations, too_long = {}, 0
    for index, prompt in enumerate(prompts):
        messages = _conversation(prompt, f"prompt {index}")
        first = Dialogue("", 0, messages)
        first.ask()
        context = chat.context_ids(first.messages)
        answerer.check(context)
        if answerer.has_room(context):
            conversations[_hash(messages)] = (len(context), messages)
        else:
            too_long += 1
    if too_long:
        logger.warning(f"{too_long} prompts leave no room for {answerer.max_new_tokens} new tokens: left out.")
    if not conversations:
        raise ValueError("There are no prompts to answer.")
    longest_first = sorted(conversations.items(), key=lambda item: -item[1][0])
    return [Dialogue(key, sample, messages) for key, (_, messages) in longest_first for sample in range(num_samples)]


def _answer_all_turns(batch: list["Dialogue"], chat: "ChatFormat", answerer: "Answerer") -> None:
    active = [dialogue for dialogue in batch if dialogue.ask()]
    while active:
        asked = [(dialogue, chat.context_ids(dialogue.messages)) for dialogue in active]
        asked = [(dialogue, context) for dialogue, context in asked if answerer.has_room(context)]
        answers = answerer([context for _, context in asked])
        for (dialogue, context), (answer, finish_reason) in zip(asked, answers):
            dialogue.add_answer(context, answer, finish_reason, chat.text(answer, answerer.stop_ids))
        active = [dialogue for dialogue, _ in asked if dialogue.ask()]


class ChatFormat:
    """The target's chat template: messages to token ids, and an answer's ids back to the text of a message."""

    def __init__(self, tokenizer, enable_thinking: bool | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: set tokenizer.chat_template to the "
                "one that the target was trained with."
            )
        self.tokenizer = tokenizer
        self.template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if enable_thinking is not None and not self.knows_thinking():
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} gives the same text whatever enable_thinking says: "
                "leave it out."
            )

    def knows_thinking(self) -> bool:
        probe = [{"role": "user", "content": "a"}]
        on, off = (self._render(probe, {"enable_thinking": value}) for value in (True, False))
        return on != off

    def context_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of the conversation so far, up to where the assistant's answer begins."""
        return self._render(messages, self.template_options)

    def _render(self, messages, options) -> list[int]:
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **options
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"The target's chat template refuses a conversation of {roles}: {error}") from error
        return list(encoded["input_ids"])

    def text(self, answer: list[int], stop_ids: set[int]) -> str:
        """An answer as the content of an assistant message: without the end-of-turn token, which the template adds."""
        if answer[-1] in stop_ids:
            answer = answer[:-1]
        return self.tokenizer.decode(answer, skip_special_tokens=True)


class Answerer:
    """Batched `target.generate()` on token ids.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, for padding, and for the end-of-turn token where the target doesn't name one.
        max_new_tokens, generation_options: for `generate()`; the rest is the target's own generation config.
    """

    def __init__(self, model, tokenizer, max_new_tokens: int, **generation_options):
        self.target = Target(model)
        self.max_new_tokens = max_new_tokens
        self.options = generation_options
        self.max_length = getattr(self.target.config, "max_position_embeddings", None)
        self.stop_ids = stop_ids(model, tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.stop_ids)

    def settings(self) -> dict:
        """Everything that decides what `generate()` returns."""
        own = {name: value for name, value in self.target.model.generation_config.to_diff_dict().items() if value}
        own.pop("transformers_version", None)
        return {**own, **self.options, "max_new_tokens": self.max_new_tokens, "eos_token_id": sorted(self.stop_ids)}

    def check(self, ids: list[int]) -> None:
        if max(ids, default=-1) not in range(self.target.config.vocab_size):
            raise ValueError(
                f"A prompt has token id {max(ids, default=None)}, but the target has "
                f"{self.target.config.vocab_size} tokens: the tokenizer is that of another model."
            )

    def has_room(self, context: list[int]) -> bool:
        return self.max_length is None or len(context) + self.max_new_tokens <= self.max_length

    def __call__(self, contexts: list[list[int]]) -> list[tuple[list[int], str]]:
        """For each context the answer's token ids, with the end-of-turn token if it came, and "stop" or "length"."""
        if not contexts:
            return []
        length = max(map(len, contexts))
        padding = [length - len(context) for context in contexts]
        input_ids = [[self.pad_id] * pad + context for pad, context in zip(padding, contexts)]
        attention_mask = [[0] * pad + [1] * len(context) for pad, context in zip(padding, contexts)]
        output = self.target.model.eval().generate(
            input_ids=torch.tensor(input_ids, device=self.target.device),
            attention_mask=torch.tensor(attention_mask, device=self.target.device),
            max_new_tokens=self.max_new_tokens,
            pad_token_id=self.pad_id,
            eos_token_id=sorted(self.stop_ids),
            num_return_sequences=1,
            return_dict_in_generate=False,
            **self.options,
        )
        return [self._until_stop(row) for row in output[:, length:].tolist()]

    def _until_stop(self, row: list[int]) -> tuple[list[int], str]:
        # Rows that stopped before the longest one are padded, and the pad token may itself be a stop token.
        for position, token in enumerate(row):
            if token in self.stop_ids:
                return row[: position + 1], "stop"
        return row, "length"


def stop_ids(target, tokenizer) -> set[int]:
    """The ids that end the target's answers; a tokenizer that ends its turns with none of them is another model's."""
    own = target.generation_config.eos_token_id
    own = {own} if isinstance(own, int) else set(own or ())
    if not own and tokenizer.eos_token_id is None:
        raise ValueError("Neither the target's generation config nor its tokenizer names an end-of-turn token.")
    if own and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in own:
        raise ValueError(
            f"The target ends its answers with token {sorted(own)}, the tokenizer with {tokenizer.eos_token_id}: the "
            "tokenizer is that of another model, or target.generation_config.eos_token_id lacks its token."
        )
    return own or {tokenizer.eos_token_id}


@dataclass
class Dialogue:
    """One conversation while it is being answered.

    `parts` are its token sequences, as (input_ids, loss_mask, finish_reason). There is one, unless the template
    renders an earlier answer otherwise than the target emitted it (thinking dropped, white space trimmed): then that
    answer stays in a part of its own, and the next part supervises only what the target emitted after its context.
    """

    key: str
    sample: int
    to_ask: list[dict]
    messages: list[dict] = field(default_factory=list)
    parts: list[tuple[list[int], list[int], str]] = field(default_factory=list)

    def __post_init__(self):
        self.identity = (self.key, self.sample)
        self.to_ask = list(self.to_ask)

    def ask(self) -> bool:
        """Move the messages up to the next user turn into the conversation; False if none is left."""
        while self.to_ask:
            self.messages.append(self.to_ask.pop(0))
            if self.messages[-1]["role"] == "user":
                return True
        return False

    def add_answer(self, context: list[int], answer: list[int], finish_reason: str, text: str) -> None:
        loss_mask = []
        if self.parts and context[: len(self.parts[-1][0])] == self.parts[-1][0]:
            loss_mask = self.parts.pop()[1]
        loss_mask = loss_mask + [0] * (len(context) - len(loss_mask)) + [1] * len(answer)
        self.parts.append((context + answer, loss_mask, finish_reason))
        self.messages.append({"role": "assistant", "content": text})

    def records(self) -> list[dict]:
        return [
            {
                "key": self.key,
                "sample": self.sample,
                "part": part,
                "num_parts": len(self.parts),
                "input_ids": input_ids,
                "loss_mask": loss_mask,
                "finish_reason": finish_reason,
            }
            for part, (input_ids, loss_mask, finish_reason) in enumerate(self.parts)
        ]


# ---- the folder


class ConversationFolder:
    """conversations.jsonl, which only grows, beside the settings that all its records were made with.

    Opening it cuts off what a killed run left half-written. `finished` holds the (key, sample) of what it has.
    """

    def __init__(self, path: str | os.PathLike, settings: dict, description: dict):
        self.path = Path(path)
        self.fingerprint = _hash(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        settings_file = self.path / SETTINGS_FILE
        if settings_file.exists():
            _check_settings(self.path, json.loads(settings_file.read_text(encoding="utf-8"))["settings"], settings)
        elif (self.path / CONVERSATIONS_FILE).exists():
            raise ValueError(f"{self.path} has conversations but no {SETTINGS_FILE}: choose another folder.")
        else:
            content = {**description, "fingerprint": self.fingerprint, "settings": settings}
            unfinished = settings_file.with_suffix(".tmp")
            unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")
            unfinished.replace(settings_file)
        self.finished = _recover(self.path / CONVERSATIONS_FILE)

    def append(self, conversations: Iterable[list[dict]]) -> None:
        """Write whole conversations (lists of records), on the disk when this returns."""
        records = ({**record, "settings": self.fingerprint} for records in conversations for record in records)
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        try:
            with open(self.path / CONVERSATIONS_FILE, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; the finished conversations are safe, and the same call goes on from them",
                str(self.path / CONVERSATIONS_FILE),
            ) from error


def _check_settings(folder: Path, found: dict, wanted: dict) -> None:
    wanted = json.loads(json.dumps(wanted))
    different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if different:
        details = "; ".join(f"{name} was {found.get(name)}, now {wanted.get(name)}" for name in different)
        raise ValueError(f"{folder} holds conversations made with other settings ({details}): choose another folder.")


def _recover(file: Path) -> set[tuple[str, int]]:
    """Cut the file after its last whole conversation; returns the (key, sample) of those it keeps."""
    finished, end = set(), 0
    file.touch()
    with open(file, "r+b") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            record = _parse(line, f"{file}, line {number}")
            if record["part"] == record["num_parts"] - 1:
                finished.add((record["key"], record["sample"]))
                end = stream.tell()
        stream.truncate(end)
    return finished


def load_conversations(
    folder: str | os.PathLike, tokenizer=None, vocab_size: int | None = None
) -> Iterator[dict[str, object]]:
    """Yield the records of a folder, each checked.

    Args:
        folder: where `regenerate` or `import_answers` wrote.
        tokenizer: the target's; refused if the records were made with another one.
        vocab_size: the target's number of tokens. Default: the one in settings.json.

    Raises:
        FileNotFoundError, ValueError: no such folder, no records in it, or a record that can't be trained on.
    """
    folder = Path(folder)
    for name in (SETTINGS_FILE, CONVERSATIONS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no conversations: it has no {name}.")
    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))["settings"]
    if tokenizer is not None and settings["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise ValueError(f"{folder} was made with another tokenizer than {tokenizer.name_or_path!r}.")
    vocab_size = vocab_size or settings["vocab_size"]
    count = 0
    with open(folder / CONVERSATIONS_FILE, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break  # what a killed run left, or one that is still writing
            where = f"{folder / CONVERSATIONS_FILE}, line {number}"
            record = _parse(line, where)
            _check_ids(record, vocab_size, where)
            count += 1
            yield record
    if not count:
        raise ValueError(f"{folder} holds no conversations yet.")


def import_answers(
    source: str | os.PathLike, out: str | os.PathLike, tokenizer, vocab_size: int, description: str = ""
) -> int:
    """Turn a JSONL file of `prompt_ids` and `answer_ids`, the target's own tokens, into a folder of conversations.

    Args:
        source: the file.
        out: the folder; lines that it has already are not written again.
        tokenizer: the target's; its end-of-turn token tells whole answers from cut ones.
        vocab_size: the target's number of tokens.
        description: how the answers were made, for settings.json.

    Returns:
        How many conversations were added.
    """
    settings = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": vocab_size,
        "imported": description or Path(source).name,
    }
    conversations, samples = [], {}
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            dialogue = _imported(line, samples, tokenizer.eos_token_id, vocab_size, f"{source}, line {number}")
            conversations.append(dialogue)
    if not conversations:
        raise ValueError(f"{source} holds no answers.")
    folder = ConversationFolder(out, settings, description={"source": Path(source).name})
    new = [dialogue for dialogue in conversations if dialogue.identity not in folder.finished]
    folder.append(dialogue.records() for dialogue in new)
    return len(new)


def _imported(line: bytes, samples: dict[str, int], eos_token_id: int, vocab_size: int, where: str) -> Dialogue:
    row = _parse(line, where)
    if not row.get("prompt_ids") or not row.get("answer_ids"):
        raise ValueError(f"{where}: prompt_ids and answer_ids must both hold tokens.")
    prompt, answer = row["prompt_ids"], row["answer_ids"]
    key = _hash(prompt)
    samples[key] = samples.get(key, -1) + 1
    dialogue = Dialogue(key, samples[key], [])
    dialogue.add_answer(prompt, answer, "stop" if answer[-1] == eos_token_id else "length", text="")
    _check_ids(dialogue.records()[0], vocab_size, where)
    return dialogue


def _parse(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: damaged line ({error}).") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a record but a {type(record).__name__}.")
    return record


def _check_ids(record: dict, vocab_size: int, where: str) -> None:
    ids, mask = record.get("input_ids"), record.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{where}: input_ids is not a list of token ids.")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{where}: token ids {min(ids)} to {max(ids)} are outside the vocabulary of {vocab_size}.")
    if not isinstance(mask, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: loss_mask is not a 0 or 1 for each of the {len(ids)} tokens.")


# ---- fingerprints


def target_fingerprint(target) -> str:
    """Tells targets apart by config and some embeddings: fine-tuned ones too, wherever they were loaded from."""
    config = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_attn_implementation", "dtype"):
        config.pop(name, None)
    target = Target(target)
    ids = torch.linspace(0, target.config.vocab_size - 1, steps=16).long()
    with torch.no_grad():
        sample = target.embed(ids).float().cpu().numpy().tobytes()
    return _hash([config, hashlib.sha256(sample).hexdigest()])


def tokenizer_fingerprint(tokenizer) -> str:
    """Tells tokenizers apart: vocabulary, how a text is split, chat template."""
    probe = tokenizer(TOKENIZER_PROBE)["input_ids"]
    return _hash([sorted(tokenizer.get_vocab().items()), probe, tokenizer.chat_template])


def _seed(seed: int, identity: tuple[str, int]) -> int:
    return int(_hash([seed, *identity])[:8], 16)  # 32 bits, which every device's generator takes


def _hash(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
