"""hf-domino demo: end to end on tiny models, what it draws, its clock, and what it says where something is missing."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_domino import demo as module
from hf_domino.acceptance import Acceptance
from hf_domino.cli import main
from hf_domino.demo import COLOURS, Comparison, TimedStream, compare, demo_drafter, rounds_text
from hf_domino.evaluation.oracle import oracle

from .tiny import tiny_drafter, tiny_target
from .training.test_data import tiny_tokenizer

PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    target.generation_config.pad_token_id = 0
    return target, tiny_drafter(target), tiny_tokenizer()


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    target, drafter, tokenizer = pair
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return ["demo", "--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--prompt", PROMPT]


@pytest.fixture(scope="module")
def continuation(pair):
    """[24], what the target says to the prompt."""
    target, _, tokenizer = pair
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return target.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]


def test_end_to_end_into_a_pipe(folders, pair, continuation, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with oracle(continuation):
        main([*folders, "--dtype", "float32", "--max-new-tokens", "24", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(pair[2].decode(continuation, skip_special_tokens=True)) == 2  # each panel once, not once a frame
    assert "Acceptance length 7.67" in out and "over 3 rounds" in out
    assert "The tokens are the same, all 24." in out and " times as fast." in out


def test_comparison_and_what_a_terminal_shows(pair, continuation, monkeypatch):
    monkeypatch.setattr(module, "FRAME_SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, height=40)
    with oracle(continuation):
        result = compare(*pair, PROMPT, max_new_tokens=24, console=console)
    assert result.plain.ids == result.assisted.ids == continuation.tolist()
    assert result.acceptance.lengths == [9, 9, 5]
    assert result.first_difference is None
    assert result.plain.prefill_seconds > 0 and result.ratio > 0
    out = console.file.getvalue()
    assert out.count("with the drafter") > 40  # a frame for each token
    last = out[out.rindex("with the drafter") :]
    assert "\x1b[38;2;0;0;0;48;2;86;180;233m" in last and "\x1b[38;2;0;0;0;48;2;230;159;0m" in last


def test_the_newest_lines_stay_in_view_while_they_come(pair, continuation):
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=10)
    screen = module.Screen(console, pair[2], PROMPT)
    screen.plain = TimedStream(screen.draw)
    screen.plain.ids = continuation.tolist()
    words = pair[2].decode(continuation, skip_special_tokens=True).split()
    with console.capture() as shown:
        console.print(screen.panels())
    assert words[-1] in shown.get() and words[0] not in shown.get()
    with console.capture() as shown, screen.live:
        screen.finish()
    assert words[-1] in shown.get() and words[0] in shown.get()


def test_accepted_tokens_are_coloured_round_by_round(pair):
    tokenizer = pair[2]
    ids = list(range(10, 20))
    text = rounds_text(tokenizer, ids, [3, 1, 2])  # one from the prompt, three rounds, three that no round holds yet
    assert text.plain == tokenizer.decode(ids)
    colour_of = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    names = tokenizer.convert_ids_to_tokens(ids)
    assert colour_of == {names[1]: COLOURS[0], names[2]: COLOURS[0], names[5]: COLOURS[0]}
    assert {span.style for span in rounds_text(tokenizer, ids, [3, 3]).spans} == set(COLOURS)


def test_a_character_of_several_tokens_is_shown_once_and_whole():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a€b")["input_ids"]
    assert len(ids) == 5
    assert rounds_text(tokenizer, ids[:3], []).plain == "a"
    text = rounds_text(tokenizer, ids, [3, 1])  # the character ends with the bonus token
    assert text.plain == "a€b" and not text.spans


def test_drawing_is_not_timed(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)

    def draw():
        clock.now += 50.0

    stream = TimedStream(draw)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for seconds, token in ((2.0, 7), (0.25, 8), (0.25, 9), (0.01, 6), (0.49, 5)):
        clock.now += seconds
        stream.put(torch.tensor([token]))
    stream.end()
    assert stream.ids == [7, 8, 9, 6, 5] and clock.now == 103.0 + 5 * 50.0  # the fourth came too soon for a frame
    assert stream.prefill_seconds == 2.0
    assert stream.tokens_per_second == pytest.approx(4 / 1.0)


def test_one_token_has_no_speed():
    stream = TimedStream(lambda: None)
    assert stream.tokens_per_second != stream.tokens_per_second and stream.prefill_seconds != stream.prefill_seconds
    stream.put(torch.tensor([[1]]))
    stream.put(torch.tensor([2]))
    assert stream.tokens_per_second != stream.tokens_per_second and stream.prefill_seconds >= 0


@pytest.mark.parametrize(
    "assisted, dtype, first, said",
    [
        ([5, 6, 7], torch.bfloat16, None, "the same, all 3"),
        ([5, 9, 7], torch.bfloat16, 1, "up to number 2, which differs. In bfloat16 a pass over several"),
        ([5, 6], torch.float16, 2, "up to number 3, which differs. In float16"),
        ([5, 6, 7, 8], torch.float32, 3, "please report it"),
    ],
)
def test_agreement(assisted, dtype, first, said):
    streams = [TimedStream(None), TimedStream(None)]
    streams[0].ids, streams[1].ids = [5, 6, 7], assisted
    result = Comparison(*streams, Acceptance(), dtype)
    assert result.first_difference == first and said in result.agreement()


# ---- where the drafter comes from


def test_the_drafter_is_that_of_the_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MODEL_CARDS", tmp_path)
    shipped = tmp_path / module.DRAFTER_NAME
    shipped.mkdir()
    for name in ("config.json", "model.safetensors"):
        (shipped / name).touch()
    assert demo_drafter() == shipped


def test_without_the_repository_one_message_says_what_to_do(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MODEL_CARDS", tmp_path)
    (tmp_path / module.DRAFTER_NAME).mkdir()
    (tmp_path / module.DRAFTER_NAME / "config.json").touch()  # a card alone is no drafter
    with pytest.raises(SystemExit) as error:
        main(folders[:3])
    for words in ("hf-domino: The drafter", str(tmp_path), "in a clone", "as --drafter"):
        assert words in str(error.value)


def test_a_missing_target_is_one_message(folders, monkeypatch):
    def demo_target():
        raise RuntimeError("the target could be had from nowhere")

    monkeypatch.setattr(module, "demo_target", demo_target)
    with pytest.raises(SystemExit, match="hf-domino: the target could be had from nowhere"):
        main(["demo", *folders[3:]])


def test_bad_input_is_one_clear_line(folders, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="max_new_tokens must be at least 2, not 1"):
        main([*folders, "--max-new-tokens", "1"])
    other = tiny_drafter(tiny_target(hidden_size=64))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match="hf-domino: .*hidden"):
        main([*folders, "--drafter", str(tmp_path / "other")])
    monkeypatch.setattr(module, "Console", None)
    with pytest.raises(SystemExit, match="pip install rich"):
        main(folders)
