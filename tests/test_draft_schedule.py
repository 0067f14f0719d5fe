"""How much is drafted: against a simulated machine with a clock of its own, and inside generate()."""

import random

import pytest
import torch

from hf_domino import DominoCandidateGenerator, track_acceptance
from hf_domino import draft_schedule as module
from hf_domino.draft_schedule import DraftSchedule, PassTimes, largest_probabilities

from .test_sampling import (
    DRAWS,
    SETTINGS,
    draw,
    exact_distribution,
    kwargs_of,
    sampling_drafter,
    sampling_noise,
    sampling_target,
    total_variation,
)
from .tiny import assert_same_as_plain, inputs, tiny_drafter, tiny_target

PLAIN, DRAFT, SLOTS = 0.040, 0.012, 7


class Machine:
    """A target whose pass takes PLAIN seconds and `added` for each drafted token; `kept(position)` is the chance that a
    draft at that place of the text is right, which the drafter knows or, with `says`, claims."""

    def __init__(self, kept, added=0.001, says=None, seed=0):
        self.kept, self.added, self.says = kept, added, says or kept
        self.random, self.now, self.position = random.Random(seed), 0.0, 0
        self.schedule = DraftSchedule(clock=lambda: self.now)
        self.blocks = []

    def run(self, tokens):
        matches = 0
        while self.position < tokens:
            drafted, confidence = 0, None
            if self.schedule.begin(matches):
                self.now += DRAFT
                confidence = [self.says(self.position)] * SLOTS
                drafted = self.schedule.cut(confidence)
                confidence = confidence[:drafted]
            self.schedule.end(confidence)
            self.now += (PLAIN + self.added * drafted) * self.random.uniform(0.95, 1.05)
            matches = 0
            while matches < drafted and self.random.random() < self.kept(self.position):
                matches += 1
            self.blocks.append(drafted)
            self.position += matches + 1
        return self.now / self.position


def fixed(chance, added, slots=SLOTS):
    """Seconds a token of blocks that are always as long."""
    tokens = sum(chance**j for j in range(slots + 1))
    return (DRAFT + PLAIN + added * slots) / tokens


@pytest.mark.parametrize("chance", (0.0, 0.05, 0.15))
def test_never_much_slower_than_plain(chance):
    """On text where drafting loses, even with a drafter that is sure of itself, at most 3 % are lost."""
    assert fixed(chance, 0.001) > 1.1 * PLAIN, "drafting must lose here"
    for seed in range(5):
        assert Machine(lambda _: chance, says=lambda _: 0.9, seed=seed).run(600) < 1.03 * PLAIN


def test_a_short_answer_pays_for_a_few_rounds():
    """Of a drafter that is sure and always wrong, and of one that knows it."""
    for seed in range(5):
        for says, most in ((0.9, 4), (0.1, 3)):
            machine = Machine(lambda _: 0.0, says=lambda _, says=says: says, seed=seed)
            machine.run(24)
            assert 1 <= sum(map(bool, machine.blocks)) <= most


def test_what_was_won_is_not_gambled_away():
    """Text that turns hopeless after a long easy stretch loses the time of a few tokens, whatever was won before."""
    for seed in range(5):
        machine = Machine(lambda position: 0.95 if position < 400 else 0.0, says=lambda _: 0.9, seed=seed)
        machine.run(400)
        start, position = machine.now, machine.position
        machine.run(position + 200)
        assert machine.now - start < (1.03 * (machine.position - position) + 5) * PLAIN


@pytest.mark.parametrize("chance", (0.6, 0.8, 0.95))
def test_nothing_is_lost_where_drafting_pays(chance):
    for seed in range(5):
        assert Machine(lambda _: chance, seed=seed).run(600) < 1.15 * fixed(chance, 0.001)


def test_blocks_are_cut_where_another_token_does_not_pay():
    """A pass that grows by a quarter with each token: short blocks beat long ones, and the schedule finds them."""
    machine = Machine(lambda _: 0.7, added=0.010)
    speed = machine.run(800)
    best = min(fixed(0.7, 0.010, slots) for slots in range(1, SLOTS + 1))
    assert best < 0.9 * fixed(0.7, 0.010)
    assert speed < 1.15 * best
    assert Machine(lambda _: 0.7, added=0.0).run(800) < 1.15 * fixed(0.7, 0.0)


def test_overconfidence_is_learnt():
    """A drafter that claims 0.95 and is right half the time is cut like one that claims 0.5."""
    claims = Machine(lambda _: 0.5, added=0.006, says=lambda _: 0.95)
    honest = Machine(lambda _: 0.5, added=0.006)
    assert claims.run(1500) < 1.05 * honest.run(1500)


def test_text_that_turns_easy_is_drafted_again():
    machine = Machine(lambda position: 0.0 if position < 300 else 0.9)
    machine.run(300)
    hard = len(machine.blocks)
    machine.run(1500)
    assert sum(map(bool, machine.blocks[:hard])) < 20
    assert sum(machine.blocks[hard:]) / len(machine.blocks[hard:]) > 4


def test_the_line_through_measured_passes():
    times = PassTimes()
    assert times.line() is None
    times.add(4, 0.09)
    assert times.line() is None
    for seconds in (0.04, 0.05, 9.0):  # one pass that something else held up
        times.add(0, seconds)
    assert times.line()[0] == 0.05
    for _ in range(16):
        times.add(4, 0.09)
        times.add(8, 0.13)
    assert times.line() == pytest.approx((0.05, 0.01), rel=0.05), "what was assumed counts little by now"
    for count in (4, 8):
        times.seconds[count].extend([0.03] * 16)
    assert times.line() == pytest.approx((0.05, 0.0))


def test_largest_probabilities():
    rows = [torch.tensor([[0.0, 0.0]]), torch.tensor([[float("-inf"), 3.0]])]
    assert largest_probabilities(rows) == pytest.approx([0.5, 1.0])


# Inside generate()


def with_machine(monkeypatch, confidence, added=0.0, ready=True):
    """Schedules of the calls inside get times from a made-up clock, and the confidence of a made-up drafter."""
    made = []

    def schedule():
        clock = iter(range(10**9))
        made.append(DraftSchedule(clock=lambda: PLAIN * next(clock)))
        if ready:
            for drafted in (0, 4):
                for _ in range(16):
                    made[-1].times.add(drafted, PLAIN + added * drafted)
        return made[-1]

    monkeypatch.setattr("hf_domino.generation_drafter.DraftSchedule", schedule)
    if confidence is not None:
        monkeypatch.setattr("hf_domino.generation_drafter.largest_probabilities", confidence)
    return made


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("head", ("domino", "none"))
@pytest.mark.parametrize("rate", (0.0, 0.6, 1.0))
def test_greedy_output_is_plain(target, head, rate, monkeypatch):
    """Blocks of all lengths and undrafted stretches between them; nothing of the context is lost by that."""
    chances = random.Random(0)

    def confidence(logits):
        count = sum(len(row) for row in logits)
        return [chances.choice((1.0, 1.0, 0.01)) for _ in range(count)]

    monkeypatch.setattr(module, "_ALLOWANCE", 0.5)  # also where all drafts are wrong, try often
    with_machine(monkeypatch, confidence, added=0.01)
    drafter = tiny_drafter(target, head=head)
    acceptance = assert_same_as_plain(
        target, drafter, rate, max_new_tokens=80, num_assistant_tokens_schedule="adaptive", **inputs()
    )
    assert 0 in acceptance.drafted and len(set(acceptance.drafted)) > 3


def test_no_feature_is_lost_in_undrafted_rounds(target, monkeypatch):
    """What is drafted after a pause is what a drafter that never paused drafts."""
    monkeypatch.setattr(module, "_ALLOWANCE", 0.5)  # also where all drafts are wrong, try often
    drafter = tiny_drafter(target)
    drafts, draft = {}, DominoCandidateGenerator.draft
    for schedule in ("constant", "adaptive"):
        drafts[schedule] = {}

        def recorded(self, input_ids, count, seen=drafts[schedule]):
            tokens, logits = draft(self, input_ids, count)
            seen[input_ids.shape[1]] = tokens[0, :2].tolist()
            return tokens, logits

        monkeypatch.setattr(DominoCandidateGenerator, "draft", recorded)
        kwargs = {**inputs(), "do_sample": False, "max_new_tokens": 60}
        target.generate(**kwargs, assistant_model=drafter, num_assistant_tokens_schedule=schedule)
    common = [at for at in drafts["adaptive"] if at in drafts["constant"] and len(drafts["constant"][at]) == 2]
    assert len(drafts["adaptive"]) < len(drafts["constant"]) and len(common) > 3
    assert all(drafts["adaptive"][at] == drafts["constant"][at] for at in common if len(drafts["adaptive"][at]) == 2)


def test_sampled_output_is_the_targets(monkeypatch):
    """Cutting by the drafts' distributions does not tilt what comes out."""
    monkeypatch.setattr("tests.test_sampling.LENGTH", 4)  # room for two drafts
    with_machine(monkeypatch, None, added=0.17 * PLAIN)
    kwargs = kwargs_of(SETTINGS["plain"])
    kwargs |= {"num_assistant_tokens_schedule": "adaptive", "max_new_tokens": 4}
    target = sampling_target()
    exact = exact_distribution(target, kwargs)
    with track_acceptance() as acceptance:
        counts = draw(target, sampling_drafter(target), kwargs)
    assert {0, 1, 2} <= set(acceptance.drafted), "blocks must be cut"
    mean, deviation = sampling_noise(exact, DRAWS)
    assert total_variation(counts, exact) < mean + 4 * deviation


def test_other_schedules_are_refused_by_name(target):
    with pytest.raises(ValueError, match="num_assistant_tokens_schedule='heuristic'.*adaptive"):
        target.generate(**inputs(), assistant_model=tiny_drafter(target), num_assistant_tokens_schedule="heuristic")


def test_as_a_models_default(target, monkeypatch):
    made = with_machine(monkeypatch, None, ready=False)
    monkeypatch.setattr(target.generation_config, "num_assistant_tokens_schedule", "adaptive")
    target.generate(**inputs(), max_new_tokens=4, do_sample=False, assistant_model=tiny_drafter(target))
    assert len(made) == 1 and module.DraftSchedule is DraftSchedule
