"""The training data: prompts read, answers regenerated with their loss masks, runs killed and resumed, bad input."""

import errno
import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_domino.training import data
from hf_domino.training.data import import_answers, load_conversations, read_prompts, regenerate

from ..tiny import VOCAB, tiny_target

SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>"]
WORDS = [*SPECIAL, "newline", "<think>", "</think>", *(f"w{i}" for i in range(VOCAB - 8))]
PAD, END, ASSISTANT, NEWLINE, THINK, END_THINK = (
    WORDS.index(word) for word in ("<pad>", "<end>", "<assistant>", "newline", "<think>", "</think>")
)

# Like most: an end-of-turn token and a line break after each message.
CHAT = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> newline {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Like Qwen3's: an empty thought where thinking is off, and the thoughts of earlier turns left out.
THINKING = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content.split('</think>')[-1] }} <end> newline {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
    "{% if add_generation_prompt and enable_thinking is false %}<think> </think> {% endif %}"
)
FORGETFUL = CHAT.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else 'w0' }}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHAT

PROMPTS = [
    [{"role": "user", "content": " ".join(f"w{(7 * start + i) % 80}" for i in range(length))}]
    for start, length in enumerate((3, 9, 1, 5, 4, 2, 12))
]
TWO_TURNS = [
    [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": "w1 w2"},
        {"role": "user", "content": "w3"},
    ],
    [{"role": "user", "content": "w4"}],
    [{"role": "user", "content": "w9 w8 w7"}, {"role": "user", "content": "w6 w5"}],
]


def tiny_tokenizer(chat_template=CHAT, words=WORDS, eos_token="<end>"):
    """One token a word, so that texts and token ids are easily compared."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos_token,
        pad_token="<pad>",
        extra_special_tokens=SPECIAL[2:],
        chat_template=chat_template,
    )


def answers_of(record):
    """The supervised stretches of a record, each with the context before it."""
    stretches, position = [], 0
    for supervised, group in itertools.groupby(record["loss_mask"]):
        length = len(list(group))
        if supervised:
            ids = record["input_ids"]
            stretches.append((ids[:position], ids[position : position + length]))
        position += length
    return stretches


def plain_answer(target, context, max_new_tokens):
    ids = torch.tensor([context])
    output = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output[0, len(context) :].tolist()


def only_words(target):
    """Let the target end its turn now and then, but not emit the tokens of the chat format."""
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = PAD
    target.generation_config.suppress_tokens = [WORDS.index(w) for w in SPECIAL if w != "<end>"] + [NEWLINE]
    with torch.no_grad():
        target.lm_head.weight[END] *= 1.5
    return target


@pytest.fixture(scope="module")
def target():
    return only_words(tiny_target())


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def datasets_cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()


def run(target, tokenizer, prompts, out, **options):
    options = {"max_new_tokens": 6, "batch_size": 3, "progress": False, **options}
    return regenerate(target, tokenizer, prompts, out, **options)


def load(out, **options):
    return list(load_conversations(out, **options))


# ---- supervised tokens


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_supervised_tokens_are_what_the_target_emits(family, tokenizer, tmp_path):
    model = tiny_target()
    if family == "llama":
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.6))
    model = only_words(model)
    assert run(model, tokenizer, PROMPTS, tmp_path, max_new_tokens=12) == len(PROMPTS)
    records = load(tmp_path, tokenizer=tokenizer)
    contexts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=True) for p in PROMPTS]
    assert sorted(answers_of(r)[0][0] for r in records) == sorted(c["input_ids"] for c in contexts)
    for record in records:
        ((context, answer),) = answers_of(record)
        assert answer == plain_answer(model, context, 12)
        assert record["input_ids"] == context + answer
        assert record["finish_reason"] == ("stop" if answer[-1] == END else "length")
    assert {record["finish_reason"] for record in records} == {"stop", "length"}


def test_turns_stay_in_one_record_and_what_the_template_adds_is_not_supervised(target, tokenizer, tmp_path):
    run(target, tokenizer, TWO_TURNS, tmp_path)
    records = load(tmp_path)
    assert sorted(len(answers_of(record)) for record in records) == [1, 2, 2]
    for record in records:
        assert (record["part"], record["num_parts"]) == (0, 1)
        for context, answer in answers_of(record):
            assert answer == plain_answer(target, context, 6)
    with_system = next(record for record in records if record["input_ids"][0] == WORDS.index("<system>"))
    (_, answer), (second_context, _) = answers_of(with_system)
    text = tokenizer.decode([token for token in answer if token != END])
    messages = [*TWO_TURNS[0][:2], {"role": "assistant", "content": text}, TWO_TURNS[0][2]]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert second_context == rendered["input_ids"]


@pytest.mark.parametrize("forced", [True, False], ids=["ended", "cut"])
def test_end_of_turn_is_supervised_only_where_the_target_emitted_it(forced, tokenizer, tmp_path):
    model = only_words(tiny_target())
    if forced:
        model.generation_config.forced_eos_token_id = END
    else:
        model.generation_config.suppress_tokens.append(END)
    run(model, tokenizer, [TWO_TURNS[2]], tmp_path)
    (record,) = load(tmp_path)
    ids, mask = record["input_ids"], record["loss_mask"]
    assert record["finish_reason"] == ("stop" if forced else "length")
    first_end = next(i for i in range(mask.index(1), len(ids)) if ids[i] == END)
    assert ids[first_end + 1] == NEWLINE
    assert mask[first_end : first_end + 2] == [int(forced), 0]


def test_template_that_strips_the_thoughts_of_earlier_turns(tmp_path):
    model = only_words(tiny_target())
    model.generation_config.suppress_tokens.append(END)
    # Every answer begins with the end of a thought.
    model.generation_config.begin_suppress_tokens = [i for i in range(VOCAB) if i != END_THINK]
    run(model, tiny_tokenizer(THINKING), [TWO_TURNS[2]], tmp_path)
    first, second = load(tmp_path)
    assert (first["part"], first["num_parts"], second["part"], second["num_parts"]) == (0, 2, 1, 2)
    assert (first["key"], first["sample"]) == (second["key"], second["sample"])
    for record in (first, second):
        ((context, answer),) = answers_of(record)
        assert answer == plain_answer(model, context, 6)
        assert answer[0] == END_THINK
        assert record["loss_mask"] == [0] * len(context) + [1] * len(answer)
    assert END_THINK not in answers_of(second)[0][0]


def test_thinking_switch_reaches_the_template(target, tmp_path):
    thinking = tiny_tokenizer(THINKING)
    for enabled, opening in ((None, []), (True, []), (False, [THINK, END_THINK])):
        out = tmp_path / str(enabled)
        run(target, thinking, PROMPTS[:2], out, enable_thinking=enabled)
        for record in load(out):
            context = answers_of(record)[0][0]
            assert context[context.index(ASSISTANT) :] == [ASSISTANT, *opening]
            assert sum(record["loss_mask"]) == len(record["input_ids"]) - len(context)


def test_template_without_the_thinking_switch_is_refused(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="whatever enable_thinking says"):
        run(target, tokenizer, PROMPTS, tmp_path, enable_thinking=False)


def test_target_in_train_mode_answers_without_dropout(tokenizer, tmp_path):
    model = only_words(tiny_target(attention_dropout=0.5)).train()
    run(model, tokenizer, PROMPTS[:1], tmp_path)
    ((context, answer),) = answers_of(load(tmp_path)[0])
    assert answer == plain_answer(model.eval(), context, 6)


# ---- sampling


def test_samples_share_their_prompt_and_differ(target, tokenizer, tmp_path):
    options = dict(do_sample=True, temperature=0.9, top_p=0.95, top_k=0, num_samples=3)
    assert run(target, tokenizer, PROMPTS[:2], tmp_path / "a", **options) == 6
    run(target, tokenizer, PROMPTS[:2], tmp_path / "b", **options)
    run(target, tokenizer, PROMPTS[:2], tmp_path / "c", **options, seed=1)
    a, b, c = (load(tmp_path / name) for name in "abc")
    assert [(r["key"], r["sample"]) for r in a] == [(r["key"], r["sample"]) for r in c]
    assert len({r["key"] for r in a}) == 2
    assert {r["sample"] for r in a} == {0, 1, 2}
    assert len({tuple(r["input_ids"]) for r in a}) > 2
    assert a == b
    assert [r["input_ids"] for r in a] != [r["input_ids"] for r in c]
    settings = json.loads((tmp_path / "a" / data.SETTINGS_FILE).read_text())
    assert settings["fingerprint"] == a[0]["settings"] != c[0]["settings"]
    assert settings["settings"]["generation"]["temperature"] == 0.9

    assert run(target, tokenizer, PROMPTS[:2], tmp_path / "a", **{**options, "num_samples": 5}) == 4
    assert load(tmp_path / "a")[:6] == a
    assert len({(r["key"], r["sample"]) for r in load(tmp_path / "a")}) == 10


def test_several_greedy_samples_are_refused(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="num_samples=2 needs do_sample=True"):
        run(target, tokenizer, PROMPTS, tmp_path, num_samples=2)


# ---- resume


def test_killed_at_any_byte_nothing_is_lost_or_doubled(target, tmp_path):
    forgetful = tiny_tokenizer(FORGETFUL)  # conversations of two turns take two records
    prompts = TWO_TURNS + PROMPTS
    run(target, forgetful, prompts, tmp_path)
    file = tmp_path / data.CONVERSATIONS_FILE
    whole, content = load(tmp_path), file.read_bytes()
    assert any(record["num_parts"] > 1 for record in whole)
    line_ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in (0, 1, *line_ends, line_ends[2] + 40, len(content) - 1):
        file.write_bytes(content[:cut])
        run(target, forgetful, prompts, tmp_path)
        resumed = load(tmp_path)
        assert sorted(resumed, key=str) == sorted(whole, key=str)
    assert run(target, forgetful, prompts, tmp_path) == 0
    assert load(tmp_path) == resumed


def test_killed_between_batches(monkeypatch, target, tokenizer, tmp_path):
    answer, calls = data.Answerer.__call__, []

    def killed(self, contexts):
        calls.append(len(contexts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, contexts)

    options = dict(do_sample=True, num_samples=2, batch_size=4)
    run(target, tokenizer, PROMPTS, tmp_path / "straight", **options)
    monkeypatch.setattr(data.Answerer, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, tokenizer, PROMPTS, tmp_path / "killed", **options)
    assert len(load(tmp_path / "killed")) == 8
    assert run(target, tokenizer, PROMPTS, tmp_path / "killed", **options) == 6
    assert load(tmp_path / "killed") == load(tmp_path / "straight")


def test_prompts_can_be_added_and_repeated_ones_are_answered_once(target, tokenizer, tmp_path):
    assert run(target, tokenizer, PROMPTS[:3] + PROMPTS[:2], tmp_path) == 3
    assert run(target, tokenizer, PROMPTS[:5], tmp_path, batch_size=1) == 2
    assert len({record["key"] for record in load(tmp_path)}) == len(load(tmp_path)) == 5


@pytest.mark.parametrize("change", [dict(max_new_tokens=7), dict(do_sample=True), dict(enable_thinking=True)], ids=str)
def test_resume_with_other_settings_is_refused(change, target, tmp_path):
    thinking = tiny_tokenizer(THINKING)
    run(target, thinking, PROMPTS[:2], tmp_path)
    before = load(tmp_path)
    with pytest.raises(ValueError, match="other settings.*choose another folder"):
        run(target, thinking, PROMPTS, tmp_path, **change)
    assert load(tmp_path) == before


def test_resume_with_another_target_or_tokenizer_is_refused(target, tokenizer, tmp_path):
    run(target, tokenizer, PROMPTS[:2], tmp_path)
    fine_tuned = only_words(tiny_target())
    with torch.no_grad():
        fine_tuned.model.embed_tokens.weight += 0.01
    with pytest.raises(ValueError, match="target was"):
        run(fine_tuned, tokenizer, PROMPTS, tmp_path)
    with pytest.raises(ValueError, match="tokenizer was"):
        run(target, tiny_tokenizer(THINKING), PROMPTS, tmp_path)


def test_full_disk_is_one_error_and_the_run_goes_on_after_it(monkeypatch, target, tokenizer, tmp_path):
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; the finished conversations are safe"):
        run(target, tokenizer, PROMPTS, tmp_path)
    run(target, tokenizer, PROMPTS, tmp_path)
    assert len({record["key"] for record in load(tmp_path)}) == len(load(tmp_path)) == len(PROMPTS)


# ---- prompts


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "a", "answer": "b"}, user("a")),
        ({"prompt": "a"}, user("a")),
        ({"prompt": user("a")}, user("a")),
        ({"text": "a", "task_id": 3}, user("a")),
        ({"turns": ["a", "b"]}, user("a", "b")),
        (
            {"messages": [{"role": "system", "content": "s"}, *user("a"), {"role": "assistant", "content": "x"}]},
            [{"role": "system", "content": "s"}, *user("a")],
        ),
        (
            {"conversations": [{"from": f, "value": v} for f, v in (("human", "a"), ("gpt", "x"), ("human", "b"))]},
            user("a", "b"),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompt_columns(kind, row, expected, tmp_path):
    path = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [row, row])
    else:
        import datasets

        datasets.Dataset.from_list([row, row]).to_parquet(path)
    assert read_prompts(path) == [expected, expected]


def test_prompt_slice_mixed_rows_and_chosen_column(tmp_path):
    path = write_jsonl(tmp_path / "mixed.jsonl", [{"question": "a", "hint": "c"}, {"turns": ["b"], "hint": "d"}])
    assert read_prompts(path) == [user("a"), user("b")]
    assert read_prompts(path, split="train[1:]") == [user("b")]
    assert read_prompts(path, column="hint") == [user("c"), user("d")]


def test_regenerate_reads_a_file(target, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"question": "w1 w2"}, {"turns": ["w3", "w4"]}])
    assert run(target, tokenizer, path, tmp_path / "out") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"question": "a"}\n{"question": \n', "no readable json file"),
        ('{"answer": "a"}\n', "row 0: no prompt in messages / .* the columns are answer"),
        ('{"question": "a"}\n{"question": "  "}\n', "row 1: a user message has no text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no user message"),
        ('{"messages": [{"role": "tool", "content": "a"}]}\n', "the role 'tool'"),
    ],
)
def test_bad_prompt_files(content, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_missing_prompt_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no prompt file .*nowhere.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_prompts_without_room_for_an_answer_are_left_out(tokenizer, tmp_path, caplog):
    model = only_words(tiny_target(max_position_embeddings=24))
    model.generation_config.suppress_tokens.append(END)
    long = user(" ".join(["w1"] * 30))
    assert run(model, tokenizer, [long, user("w1", "w2", "w3"), user("w1")], tmp_path) == 2
    assert "1 prompts leave no room for 6 new tokens" in caplog.text
    assert sorted(len(answers_of(record)) for record in load(tmp_path)) == [1, 2]
    with pytest.raises(ValueError, match="no prompts to answer"):
        run(model, tokenizer, [long], tmp_path)


# ---- pairings and folders that don't fit


def test_wrong_tokenizers_are_refused_before_the_folder_is_made(target, tmp_path):
    out = tmp_path / "out"
    more_words = WORDS[:6] + [f"x{i}" for i in range(100)] + WORDS[6:]
    for tokenizer, message in (
        (tiny_tokenizer(chat_template=None), "has no chat template"),
        (tiny_tokenizer(words=more_words), "token id .* but the target has 97 tokens"),
        (tiny_tokenizer(eos_token="<user>"), r"ends its answers with token \[1\], the tokenizer with 3"),
        (tiny_tokenizer(NO_SYSTEM), "refuses a conversation of system, user: no system role here"),
    ):
        with pytest.raises(ValueError, match=message):
            run(target, tokenizer, TWO_TURNS, out)
    with pytest.raises(ValueError, match="no prompts to answer"):
        run(target, tiny_tokenizer(), [], out)
    assert not out.exists()


def test_target_without_an_end_of_turn_token(tokenizer, tmp_path):
    model = tiny_target()
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="Neither .* names an end-of-turn token"):
        run(model, tiny_tokenizer(eos_token=None), PROMPTS, tmp_path)
    run(model, tokenizer, PROMPTS, tmp_path)
    for record in load(tmp_path):
        assert END not in answers_of(record)[0][1][:-1]


GOOD = {"key": "k", "sample": 0, "part": 0, "num_parts": 1, "input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: damaged line"),
        ("[]", "line 2: not a record but a list"),
        (json.dumps({**GOOD, "input_ids": [3, 4, VOCAB]}), "token ids 3 to 97 are outside the vocabulary of 97"),
        (json.dumps({**GOOD, "input_ids": [-1, 4, 5]}), "token ids -1 to 5"),
        (json.dumps({**GOOD, "input_ids": "345"}), "not a list of token ids"),
        (json.dumps({**GOOD, "input_ids": []}), "not a list of token ids"),
        (json.dumps({**GOOD, "loss_mask": [0, 1]}), "loss_mask is not a 0 or 1 for each of the 3 tokens"),
        (json.dumps({**GOOD, "loss_mask": [0, 1, 2]}), "loss_mask is not"),
    ],
)
def test_bad_records(line, message, tmp_path):
    (tmp_path / data.SETTINGS_FILE).write_text(json.dumps({"settings": {"vocab_size": VOCAB}}))
    (tmp_path / data.CONVERSATIONS_FILE).write_text(json.dumps(GOOD) + "\n" + line + "\n")
    records = load_conversations(tmp_path)
    assert next(records) == GOOD
    with pytest.raises(ValueError, match=message):
        next(records)


def test_empty_and_foreign_folders(target, tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no conversations: it has no settings.json"):
        load(tmp_path / "nowhere")
    run(target, tokenizer, PROMPTS[:1], tmp_path)
    with pytest.raises(ValueError, match="made with another tokenizer"):
        load(tmp_path, tokenizer=tiny_tokenizer(words=WORDS[:8] + WORDS[:7:-1]))
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        load(tmp_path, vocab_size=10)
    file = tmp_path / data.CONVERSATIONS_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="holds no conversations yet"):
        load(tmp_path)
    (tmp_path / data.SETTINGS_FILE).unlink()
    with pytest.raises(ValueError, match="conversations but no settings.json"):
        run(target, tokenizer, PROMPTS[:1], tmp_path)


# ---- answers that exist already


def test_import_answers(tokenizer, tmp_path):
    rows = [
        {"prompt_ids": [3, 9, 4], "answer_ids": [10, 11, END]},
        {"prompt_ids": [3, 8, 4], "answer_ids": [12, 13]},
        {"prompt_ids": [3, 9, 4], "answer_ids": [14]},
    ]
    source = write_jsonl(tmp_path / "answers.jsonl", rows)
    assert import_answers(source, tmp_path / "out", tokenizer, VOCAB) == 3
    assert import_answers(source, tmp_path / "out", tokenizer, VOCAB) == 0
    records = load(tmp_path / "out", tokenizer=tokenizer)
    assert [r["input_ids"] for r in records] == [r["prompt_ids"] + r["answer_ids"] for r in rows]
    assert [r["loss_mask"] for r in records] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1]]
    assert [r["finish_reason"] for r in records] == ["stop", "length", "length"]
    assert [r["sample"] for r in records] == [0, 0, 1]
    assert records[0]["key"] == records[2]["key"] != records[1]["key"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no answers"),
        ([{"prompt_ids": [1]}], "line 1: prompt_ids and answer_ids must both hold tokens"),
        ([{"prompt_ids": [1], "answer_ids": [VOCAB]}], "outside the vocabulary of 97"),
    ],
)
def test_import_of_bad_answers_leaves_no_folder(rows, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        import_answers(write_jsonl(tmp_path / "answers.jsonl", rows), tmp_path / "out", tokenizer, VOCAB)
    assert not (tmp_path / "out").exists()
