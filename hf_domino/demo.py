"""hf-domino demo: one prompt, decoded without and with a drafter, side by side."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import BaseStreamer

from .acceptance import Acceptance, track_acceptance
from .demo_target import demo_target
from .modeling_domino import DominoDrafter

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ImportError:  # it comes with the `demo` extra; the other commands do without
    Console = None

PROMPT = (
    "Mara bakes 5 trays of 12 cookies. She gives 18 cookies to her neighbors and sells the rest for $2 each. "
    "How much money does she earn?"
)
DRAFTER_NAME = "SmolLM2-135M-Instruct-Domino-b8"
MODEL_CARDS = Path(__file__).parent.parent / "model_cards"

COLOURS = ("#000000 on #56b4e9", "#000000 on #e69f00")  # of Okabe and Ito's palette; they alternate round by round
FRAME_SECONDS = 0.1
WARM_UP_TOKENS = 16


@dataclass
class DemoOptions:
    """Decode one prompt without and with a drafter, side by side, and say what the drafter gained.

    Without arguments it is SmolLM2-135M-Instruct with the drafter that was trained for it.
    """

    prompt: str = field(default=PROMPT, metadata={"help": "What the target is asked."})
    target: str | None = field(default=None, metadata={"help": "A folder or a model on the Hub."})
    drafter: str | None = field(default=None, metadata={"help": "A folder or a model on the Hub, made for the target."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of both. In float32 the tokens are always the same."})
    max_new_tokens: int = field(default=128, metadata={"help": "Room for the answer, in tokens."})
    device: str | None = field(
        default=None, metadata={"help": "Of both. Default: the first accelerator, else the CPU."}
    )


def run_demo(options: DemoOptions) -> None:
    if Console is None:
        raise ImportError("the demo draws with rich: pip install rich")
    console = Console(highlight=False)
    try:
        drafter_name = options.drafter or demo_drafter()
        target_name = options.target or demo_target()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    console.print(f"target   {target_name}\ndrafter  {drafter_name}\n", soft_wrap=True, markup=False)
    device = options.device or (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    target, drafter = (
        kind.from_pretrained(name, dtype=options.dtype).to(device).eval()
        for kind, name in ((AutoModelForCausalLM, target_name), (DominoDrafter, drafter_name))
    )
    compare(target, drafter, tokenizer, options.prompt, options.max_new_tokens, console).print_summary(console)


def demo_drafter() -> Path:
    """Return the folder of the drafter that was trained for SmolLM2-135M-Instruct: `model_cards/` beside the package.

    Raises:
        RuntimeError: it is not there, as in an installation without the repository; the message says what to do.
    """
    folder = MODEL_CARDS / DRAFTER_NAME
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise RuntimeError(
            f"The drafter {DRAFTER_NAME} is not in {MODEL_CARDS}, where a clone of the repository has it. Run this in "
            "a clone (pip install -e .), or pass the folder or Hub id of a drafter you have as --drafter."
        )
    return folder


# ---- decoding and timing


class TimedStream(BaseStreamer):
    """Collects the tokens of one generate() call with the seconds at which they came, and has them drawn.

    Args:
        draw: called without arguments at most every `FRAME_SECONDS`. The clock stands still meanwhile, so that drawing
            is in none of the times.
    """

    def __init__(self, draw):
        self.draw = draw
        self.ids: list[int] = []
        self.times: list[float] = []
        self.start = time.perf_counter()
        self._prompt_seen, self._drawing, self._last_frame = False, 0.0, self.start

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.ids += value.flatten().tolist()
        self.times.append(now - self._drawing)
        if now - self._last_frame >= FRAME_SECONDS:
            self.draw()
            self._last_frame = time.perf_counter()
            self._drawing += self._last_frame - now

    def end(self) -> None:
        self.draw()

    @property
    def prefill_seconds(self) -> float:
        """From the call to the first token, which the pass over the prompt gives. NaN before it."""
        return self.times[0] - self.start if self.times else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: every token behind the first one. NaN where there are none."""
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        return (len(self.times) - 1) / seconds if seconds > 0 else math.nan


@dataclass
class Comparison:
    """One prompt decoded without and with a drafter."""

    plain: TimedStream
    assisted: TimedStream
    acceptance: Acceptance
    dtype: torch.dtype

    @property
    def ratio(self) -> float:
        """Tokens per second with the drafter to those without."""
        return self.assisted.tokens_per_second / self.plain.tokens_per_second

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that is not the same, or None."""
        plain, assisted = self.plain.ids, self.assisted.ids
        differs = (i for i, (one, other) in enumerate(zip(plain, assisted)) if one != other)
        shorter = min(len(plain), len(assisted))
        return next(differs, None if len(plain) == len(assisted) else shorter)

    def print_summary(self, console) -> None:
        table = Table(box=None, pad_edge=False)
        for title in ("", "plain", "with the drafter"):
            table.add_column(title, justify="right" if title else "left", no_wrap=True)
        both = (self.plain, self.assisted)
        table.add_row("new tokens", *(str(len(stream.ids)) for stream in both))
        table.add_row("reading the prompt, s", *(f"{stream.prefill_seconds:.2f}" for stream in both))
        table.add_row("tokens per second, decoding", *(f"{stream.tokens_per_second:.1f}" for stream in both))
        console.print(table)
        console.print(
            f"\n{self.ratio:.2f} times as fast. Acceptance length {self.acceptance.mean:.2f}: tokens kept a round, the "
            f"target's own included, over {len(self.acceptance.lengths)} rounds.\n{self.agreement()}"
        )

    def agreement(self) -> str:
        """Whether the tokens are the same; where not, which one differs first, and why that can be."""
        first = self.first_difference
        if first is None:
            return f"The tokens are the same, all {len(self.plain.ids)}."
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"The tokens are the same up to number {first + 1}, which differs. "
        if self.dtype == torch.float32:
            return text + "In float32 that should not be: please report it with this command."
        return text + (
            f"In {dtype} a pass over several tokens rounds differently from a pass over one, so a near tie between two "
            "tokens can fall the other way; --dtype float32 shows the same tokens."
        )


def compare(target, drafter, tokenizer, prompt: str, max_new_tokens: int = 128, console=None) -> Comparison:
    """Decode a prompt greedily without and then with a drafter, and show both as they come.

    Args:
        target, drafter: in eval mode, on one device.
        prompt: text, put through the tokenizer's chat template if it has one.
        console: of rich. Without a terminal the panels are printed once, at the end. Default: standard output.

    Raises:
        ValueError: `max_new_tokens` is less than 2 (one token says nothing about decoding), or the two models do not
            belong together.
    """
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens must be at least 2, not {max_new_tokens}.")
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    kwargs = {**inputs.to(target.device), "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for assistant in ({"assistant_model": drafter}, {}):
        target.generate(**kwargs, **assistant, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens))

    screen = Screen(console or Console(highlight=False), tokenizer, prompt)
    kwargs["max_new_tokens"] = max_new_tokens
    with screen.live:
        plain = screen.plain = TimedStream(screen.draw)
        target.generate(**kwargs, streamer=plain)
        with track_acceptance() as screen.acceptance:
            assisted = screen.assisted = TimedStream(screen.draw)
            target.generate(**kwargs, streamer=assisted, assistant_model=drafter)
        screen.finish()
    return Comparison(plain, assisted, screen.acceptance, target.dtype)


# ---- drawing


class Screen:
    """The prompt over two panels of text: without, and with a drafter."""

    def __init__(self, console, tokenizer, prompt):
        self.console, self.tokenizer, self.prompt = console, tokenizer, prompt
        self.plain = self.assisted = None
        self.acceptance = Acceptance()
        self.is_over = not console.is_terminal
        self.live = Live(self.panels(), console=console, auto_refresh=False)

    def draw(self):
        self.live.update(self.panels(), refresh=True)

    def finish(self):
        """The whole text stays, however long it is."""
        self.is_over = True
        self.draw()

    def panels(self):
        columns = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in range(2):
            columns.add_column(ratio=1)
        columns.add_row(
            self.panel("plain", self.plain, []), self.panel("with the drafter", self.assisted, self.acceptance.lengths)
        )
        legend = Text.assemble(
            ("drafted and accepted", COLOURS[0]), ", ", ("in the next round", COLOURS[1]), ", the target's own"
        )
        return Group(Text(self.prompt, "italic"), columns, legend if self.console.color_system else Text(""))

    def panel(self, title, stream, lengths):
        text = rounds_text(self.tokenizer, stream.ids if stream else [], lengths)
        lines = text.wrap(self.console, max(self.console.width // 2 - 6, 1))
        rate = f"{stream.tokens_per_second:.1f} tokens/s" if stream and len(stream.times) > 1 else None
        return Panel(self.newest(lines), title=title, subtitle=rate, title_align="left", subtitle_align="right")

    def newest(self, lines):
        """The lines that fit between the prompt and the legend while they come."""
        if self.is_over:
            return Text("\n").join(lines)
        prompt_lines = Text(self.prompt).wrap(self.console, self.console.width)
        return Text("\n").join(lines[-max(self.console.height - len(prompt_lines) - 4, 1) :])


def rounds_text(tokenizer, ids: list[int], lengths: list[int]):
    """The text of new tokens, with the accepted drafts of each round in its colour.

    Args:
        ids: new tokens. The first one came from the pass over the prompt.
        lengths: tokens kept in each round, the target's own behind the drafts.
    """
    styles = [""]
    for number, length in enumerate(lengths):
        styles += [COLOURS[number % 2]] * (length - 1) + [""]
    styles += [""] * (len(ids) - len(styles))  # of a round that is not over
    text, shown = Text(), 0
    for count, style in enumerate(styles[: len(ids)], 1):
        # A token may end within a character, which is then shown with the token that completes it.
        decoded = tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        text.append(decoded[shown:], style)
        shown = max(shown, len(decoded))
    return text
