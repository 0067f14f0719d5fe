"""The benchmark: what it counts, what it times, that it is fair, and what it writes."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer
from transformers.generation import candidate_generator

from hf_domino import track_acceptance
from hf_domino.cli import main
from hf_domino.evaluation import benchmark, report, timing
from hf_domino.evaluation.benchmark import Bench, bytes_of_a_round
from hf_domino.evaluation.methods import METHODS, OURS, Method
from hf_domino.evaluation.oracle import oracle
from hf_domino.evaluation.peers import published_loop, stock_dflash
from hf_domino.evaluation.prompts import SETS, read_set, spread
from hf_domino.evaluation.summary import bootstrap, median, ratio_of_sums, summarise, whole_rounds
from hf_domino.evaluation.timing import own_pass, rounds_of, watch_passes

from ..tiny import inputs, tiny_drafter, tiny_eagle3, tiny_target
from ..training.test_data import END, tiny_tokenizer

CONVERSATIONS = [[{"role": "user", "content": f"w{i} w{2 * i + 1} w7"}] for i in range(5)]
TWO_TURNS = [*CONVERSATIONS[0], {"role": "user", "content": "w9"}]
BUDGET = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    target = tiny_target()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = END, 0
    return target


def plain(target):
    return Method("plain", lambda inputs, settings: target.generate(**inputs, **settings))


def with_oracle(target, name="domino", rate=1.0, **fields):
    """Our generator with drafts that are right at that rate."""
    # The answer comes from a twin, whose passes are not watched and take no time.
    drafter, twin = tiny_drafter(target, **fields), tiny_target()
    twin.generation_config = target.generation_config

    def run(inputs, settings):
        answer = twin.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :]
        with oracle(answer, rate):
            return target.generate(**inputs, **settings, assistant_model=drafter)

    return Method(name, run, drafter)


def bench(target, methods, **settings):
    return Bench(target, tiny_tokenizer(), methods, {**BUDGET, **settings})


# ---- counting


@pytest.mark.parametrize("rate", (1.0, 0.7, 0.0))
@pytest.mark.parametrize("stop", (None, 13), ids=("room", "stop"))
def test_rounds_are_those_that_the_tracker_saw(target, rate, stop):
    text = target.generate(**inputs(), **BUDGET)[0, 7:]
    # A stop in the middle of a block.
    stops = {} if stop is None else {"eos_token_id": text[stop].item()}
    with oracle(text, rate), track_acceptance() as acceptance, watch_passes(target) as passes:
        out = target.generate(**inputs(), **BUDGET, **stops, assistant_model=tiny_drafter(target))
    assert rounds_of(passes, out.shape[1]) == (acceptance.lengths, acceptance.drafted)
    assert out.shape[1] == 7 + 1 + sum(acceptance.lengths) and len(acceptance.lengths) > 1
    assert (max(acceptance.lengths) > 5) == (rate == 1.0) or rate == 0.7


def few():
    """So few tokens that some drafts of a random drafter are right."""
    target = tiny_target(vocab_size=8)
    target.generation_config.eos_token_id = None
    ids = torch.randint(1, 5, (1, 7), generator=torch.Generator().manual_seed(3))
    return target, dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)


def test_rounds_of_the_published_loop():
    target, call = few()
    drafter = tiny_drafter(target, mask_token_id=7)
    with watch_passes(target) as passes:
        out, lengths = published_loop(target, drafter, call["input_ids"], 40)
    assert rounds_of(passes, out.shape[1])[0] == lengths and max(lengths) > 2
    with watch_passes(target) as own_passes:
        target.generate(**call, assistant_model=drafter)
    assert rounds_of(own_passes, out.shape[1])[0] == lengths


@pytest.mark.parametrize("peer", ("assistant", "prompt-lookup", "stock-dflash"))
def test_rounds_of_transformers_own_generators(peer):
    target, call = few()
    if peer == "assistant":
        other = tiny_target(vocab_size=8, num_hidden_layers=2)
        # The same up to its depth, so that it is sometimes right.
        other.load_state_dict(target.state_dict(), strict=False)
        kind, extra = candidate_generator.AssistedCandidateGenerator, {"assistant_model": other}
    elif peer == "prompt-lookup":
        kind, extra = candidate_generator.PromptLookupCandidateGenerator, {"prompt_lookup_num_tokens": 10}
    else:
        kind = candidate_generator.DFlashTokenCandidateGenerator
        stock = stock_dflash(tiny_drafter(target, mask_token_id=7, head="none", sample_from_anchor=False), target)
        extra = {"assistant_model": stock, "speculation_type": "dflash"}
    kept, update = [], kind.update_candidate_strategy

    def counted(self, input_ids, scores, num_matches):
        kept.append(int(num_matches) + 1)
        return update(self, input_ids, scores, num_matches)

    with mock.patch.object(kind, "update_candidate_strategy", counted), watch_passes(target) as passes:
        out = target.generate(**call, **extra)
    # The first pass reads the prompt; some of these draft before it already.
    assert rounds_of(passes, out.shape[1])[0] == kept[1:] and max(kept[1:]) > 1
    assert torch.equal(out, target.generate(**call))


def test_whole_rounds_leave_out_those_that_were_cut():
    def record(kept, drafted, stopped=False, first=1):
        return {"kept": kept, "drafted": drafted, "tokens": first + sum(kept), "stopped": stopped}

    # The last round, which the stop cut.
    assert whole_rounds(record([3, 2, 1], [4, 4, 4], stopped=True), 99) == [(3, 4), (2, 4)]
    assert whole_rounds(record([3], [4], stopped=True), 99) == []
    # Room for 5 tokens a round; whether they were kept does not matter.
    assert whole_rounds(record([5, 1, 1, 3], [4, 4, 3, 2]), 11) == [(5, 4), (1, 4)]
    assert whole_rounds(record([5, 1, 1, 3], [4, 4, 4, 4]), 11) == [(5, 4), (1, 4)]
    # A block that was shorter by choice is whole, and so is a round without drafts.
    assert whole_rounds(record([3, 1, 2], [4, 0, 2]), 99) == [(3, 4), (1, 0), (2, 2)]
    # Prompt lookup may have kept drafts in the pass over the prompt.
    assert whole_rounds(record([2, 2], [4, 4], first=5), 10) == [(2, 4)]
    assert whole_rounds(record([1] * 9, [0] * 9), 10) == [(1, 0)] * 9


# ---- timing


class Clock:
    """Seconds pass where the test says so, and nowhere else."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def spend(self, seconds):
        self.seconds += seconds


@pytest.fixture
def timed_target(monkeypatch):
    """A target on a fake clock: 10 s for a prompt, else 1 s and 0.125 s for each token beyond the first."""
    target = tiny_target()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = END, 0
    target.clock = Clock(monkeypatch)

    def spend(module, args, kwargs, output):
        cache = kwargs.get(timing._CACHE)
        width = output.last_hidden_state.shape[1]
        is_prompt = cache.get_seq_length() == width
        target.clock.spend(10 if is_prompt else 1 + 0.125 * (width - 1))

    target.model.register_forward_hook(spend, with_kwargs=True)
    return target


def on_the_clock(target, slow_calls=0, **kwargs):
    """Our method with perfect drafts, a round of which costs 0.5 s; its first calls lose 1000 s, and so do plain's."""
    methods = [plain(target), with_oracle(target, **kwargs)]
    methods[1].drafter.register_forward_hook(lambda *_: target.clock.spend(0.5))
    calls = {method.name: 0 for method in methods}
    for method in methods:

        def run(inputs, settings, method=method, original=method.run):
            calls[method.name] += 1
            if calls[method.name] <= slow_calls:
                target.clock.spend(1000)
            return original(inputs, settings)

        method.run = run
    return methods, calls


@pytest.mark.parametrize("num_prompts", (1, 3))
def test_cold_calls_are_left_out(timed_target, num_prompts):
    methods, calls = on_the_clock(timed_target, slow_calls=2)
    one = bench(timed_target, methods)
    one.warm_up(CONVERSATIONS[0], 2)
    assert calls == {"plain": 2, "domino": 2}  # whatever is measured later
    one.measure_set("a", CONVERSATIONS[:num_prompts])
    assert all(record["decode_seconds"] < 100 for record in one.result["records"])
    assert len(one.result["records"]) == 2 * num_prompts


def test_times_are_those_of_the_clock(timed_target):
    methods, _ = on_the_clock(timed_target)
    one = bench(timed_target, methods, max_new_tokens=19)
    one.measure_set("a", CONVERSATIONS[:3])
    one.profile_set("a", CONVERSATIONS[:2])
    one.measure_bounds("a")
    by_method = {record["method"]: record for record in one.result["records"]}
    assert by_method["plain"]["prefill_seconds"] == by_method["domino"]["prefill_seconds"] == 10
    assert by_method["plain"]["decode_seconds"] == 18
    # 18 tokens behind the first one: 8 drafts and one of the target's own, twice; with room for 9 drafts the second
    # block still has all 8.
    assert by_method["domino"]["kept"] == [9, 9] and by_method["domino"]["drafted"] == [8, 8]
    assert by_method["domino"]["decode_seconds"] == 2 * (1 + 8 * 0.125 + 0.5)
    rows = {row["method"]: row for row in summarise(one.result)}
    own = rows["domino"]
    assert own["speedup"] == own["speedup_low"] == own["slowest"] == pytest.approx(18 / 5)
    assert own["acceptance_length"] == 9 and own["tokens_per_second"] == pytest.approx(18 / 5)
    assert own["speedup_with_prefill"] == pytest.approx(28 / 15)
    assert own["efficiency"] == pytest.approx(18 / 5 / 9) and own["efficiency_bound"] == pytest.approx(1 / 2)
    assert rows["plain"]["speedup"] == 1 and rows["plain"]["efficiency_bound"] == 1
    assert own["agreement"] == 1 and own["prefill_ms"] == 10_000
    profile = {row["method"]: row["ms"] for row in one.result["profile"]}
    assert profile["domino"] == pytest.approx(
        {"features": 0, "backbone": 500, "output head": 0, "correction": 0, "verify": 2000, "rest": 0}
    )
    assert profile["plain"] == pytest.approx({"verify": 1000, "rest": 0})
    assert own_pass(timed_target, 20, 5) == 1.5


def test_the_pass_over_the_prompt_is_no_round_of_the_drafter():
    passes = [timing.Pass(0, 50, "", 5.0), *[timing.Pass(50, 5, "", 2.0)] * 3]
    # 1 s and 3 s in the first calls, which take in the prompt.
    seconds = {"features": [1.25, 0.25, 0.25], "backbone": [3.5, 0.5, 0.5], "output head": [1, 1, 1]}
    parts = benchmark.parts_of_a_call(seconds, passes, total=5.0 + 6.0 + 0.75 + 1.5 + 3 + 4 + 0.6)
    assert parts == pytest.approx({"features": 0.75, "backbone": 1.5, "output head": 3, "verify": 6, "rest": 0.6})
    parts = benchmark.parts_of_a_call({}, passes, total=5.0 + 6.0 + 2.0)
    assert parts == pytest.approx({"verify": 6, "drafting and rest": 2})


# ---- fairness


def test_all_methods_run_under_the_same_conditions(target):
    methods = [plain(target), with_oracle(target), Method("prompt-lookup", None)]
    methods[2].run = lambda inputs, settings: target.generate(**inputs, **settings, prompt_lookup_num_tokens=10)
    seen = []
    for method in methods:

        def run(inputs, settings, method=method, original=method.run):
            seen.append((method.name, inputs["input_ids"].tolist(), dict(settings), target.dtype, target.training))
            return original(inputs, settings)

        method.run = run
    one = bench(target, methods)
    one.measure_set("a", CONVERSATIONS[:3])
    told = [call[1:] for call in seen]
    assert all(told[i] == told[3 * (i // 3)] for i in range(9)) and told[0] != told[3]
    template = tiny_tokenizer().apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True)["input_ids"]
    assert told[0][0] == [template] and told[0][1]["max_new_tokens"] == 24
    # One after the other on each prompt, in a turning order.
    assert [call[0] for call in seen] == [
        *("plain", "domino", "prompt-lookup"),
        *("domino", "prompt-lookup", "plain"),
        *("prompt-lookup", "plain", "domino"),
    ]
    one.result["summary"] = summarise(one.result)
    said = report.table({"here": [one.result]})
    same = "dtype float32, attention sdpa, cache DynamicCache, max new tokens 24"
    assert f"the same for all methods: {same}" in said


def test_of_repeated_calls_the_one_of_median_time_counts(target, monkeypatch):
    one = Bench(target, tiny_tokenizer(), [plain(target), with_oracle(target)], BUDGET, repeats=3)
    order, times, measure = [], iter([9.0, 1.0, 5.0, 2.0, 6.0, 3.0]), one._measure

    def measured(method, inputs):
        record, answer = measure(method, inputs)
        order.append(method.name)
        return {**record, "decode_seconds": next(times)}, answer

    monkeypatch.setattr(one, "_measure", measured)
    one.measure_set("a", CONVERSATIONS[:1])
    assert one.num_calls(CONVERSATIONS[:1]) == 6 and order == 3 * ["plain", "domino"]
    assert [record["decode_seconds"] for record in one.result["records"]] == [6.0, 2.0]
    with pytest.raises(ValueError, match="at least 1"):
        Bench(target, tiny_tokenizer(), [plain(target)], BUDGET, repeats=0)


def test_other_conditions_are_said(target):
    def run(inputs, settings):
        return target.generate(**inputs, **settings, cache_implementation="static", disable_compile=True)

    one = bench(target, [plain(target), Method("prompt-lookup", run)])
    one.measure_set("a", CONVERSATIONS[:1])
    one.result["summary"] = summarise(one.result)
    said = report.table({"here": [one.result]})
    assert "the same for all" not in said
    assert "plain: dtype float32, attention sdpa, cache DynamicCache" in said
    assert "prompt lookup: dtype float32, attention sdpa, cache StaticCache" in said


def test_prompts_are_spread_and_none_is_repeated(target):
    assert spread(list(range(80)), 8) == list(range(0, 80, 10))
    assert spread([1, 2, 3], 2) == [1, 2] and spread([1, 2], 5) == spread([1, 2], None) == [1, 2]
    one = bench(target, [plain(target), with_oracle(target, rate=0.8)])
    assert one.num_calls([*CONVERSATIONS, TWO_TURNS], 3) == 3 + 7
    one.measure_set("a", [*CONVERSATIONS, TWO_TURNS], plain_prompts=3)
    calls = [(r["prompt"], r["turn"], r["method"]) for r in one.result["records"]]
    assert len(calls) == len(set(calls)) == one.num_calls([*CONVERSATIONS, TWO_TURNS], 3)
    assert {prompt for prompt, _, method in calls if method == "plain"} == {0, 2, 4}
    rows = {row["method"]: row for row in summarise(one.result)}
    assert rows["domino"]["prompts"] == 6 and rows["domino"]["answers"] == 7 and rows["domino"]["speedup_prompts"] == 3
    assert rows["plain"]["prompts"] == 3 and rows["domino"]["agreement"] == 1


def test_later_turns_follow_plains_answer(target):
    seen = {}
    methods = [plain(target), with_oracle(target)]
    for method in methods:

        def run(inputs, settings, method=method, original=method.run):
            out = original(inputs, settings)
            seen.setdefault(method.name, []).append((inputs["input_ids"][0].tolist(), out[0].tolist()))
            return out

        method.run = run
    bench(target, methods, max_new_tokens=9).measure_set("a", [TWO_TURNS])
    (first, answered), (second, _) = seen["plain"]
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(answered[len(first) :], skip_special_tokens=True)
    messages = [TWO_TURNS[0], {"role": "assistant", "content": text}, TWO_TURNS[1]]
    assert second == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [ids for ids, _ in seen["domino"]] == [first, second]


def test_agreement_says_where_answers_part(target):
    def other(inputs, settings):
        out = target.generate(**inputs, **settings).clone()
        out[0, inputs["input_ids"].shape[1] + 5] = 1
        return out

    one = bench(target, [plain(target), Method("assistant", other)])
    one.measure_set("a", CONVERSATIONS[:2])
    peers = [record for record in one.result["records"] if record["method"] == "assistant"]
    assert [record["first_difference"] for record in peers] == [5, 5]
    assert {row["method"]: row["agreement"] for row in summarise(one.result)} == {"plain": 1.0, "assistant": 0.0}
    assert benchmark.first_difference([1, 2], [1, 2, 3]) == 2 and benchmark.first_difference([1], [1]) is None


def test_a_peer_that_fails_is_left_out(target, capsys):
    def fail(inputs, settings):
        raise RuntimeError("no such model")

    one = bench(target, [plain(target), Method("assistant", fail)])
    one.warm_up(CONVERSATIONS[0], 1)
    assert [method.name for method in one.methods] == ["plain"]
    assert one.result["skipped"] == {"assistant": "RuntimeError: no such model"}
    ours = Method("domino", fail, tiny_drafter(target))
    with pytest.raises(RuntimeError, match="no such model"):
        bench(target, [plain(target), ours]).warm_up(CONVERSATIONS[0], 1)


# ---- arithmetic


def test_bootstrap():
    value, low, high = bootstrap(median, [1.0, 2.0, 4.0, 3.0, 9.0])
    assert value == 3 and 1 <= low < 3 < high <= 9
    # Uneven enough for other draws to have other intervals.
    columns = [1.1**i for i in range(20)], [1] * 20
    assert bootstrap(ratio_of_sums, *columns) == bootstrap(ratio_of_sums, *columns)
    assert bootstrap(ratio_of_sums, *columns) != bootstrap(ratio_of_sums, *columns, seed=1)
    # Prompts are drawn whole: long ones weigh more.
    assert bootstrap(ratio_of_sums, [30, 1], [10, 1]) == (pytest.approx(31 / 11), 1, 3)
    assert bootstrap(median, [2.0] * 4) == (2, 2, 2)
    assert bootstrap(median, [2.0]) == (2, None, None) and bootstrap(median, []) == (None, None, None)


def test_tau_by_step_and_by_prompt():
    def record(prompt, kept):
        drafted = [4] * len(kept)
        rest = {"first_difference": None, "same_as_plain": None, "peak_memory": None, "stopped": False}
        times = {"tokens": 1 + sum(kept), "prefill_seconds": 1.0, "decode_seconds": 2.0}
        return {"set": "a", "method": "domino", "prompt": prompt, "kept": kept, "drafted": drafted, **times, **rest}

    records = [record(0, [5, 5, 5, 5]), record(1, [1]), record(2, [])]
    result = {"settings": {"max_new_tokens": 99}, "records": records, "own_pass": []}
    (row,) = summarise(result)
    assert row["acceptance_length"] == pytest.approx(21 / 5) and row["acceptance_length_per_prompt"] == 3
    assert row["speedup"] is None and row["agreement"] is None and row["prompts"] == 3 and row["rounds"] == 5
    assert row["tokens_per_second"] == pytest.approx((20 / 2 + 1 / 2) / 2)
    assert (row["acceptance_length_low"], row["acceptance_length_high"]) == (1, 5)


def test_bytes_of_a_round(target):
    hidden, vocab, slots = 32, 97, 8
    drafter = tiny_drafter(target, num_correction_candidates=10)
    found = bytes_of_a_round(target, drafter, slots)
    assert found["output head"] == 4 * hidden * vocab
    assert found["target"] == 4 * (sum(p.numel() for p in target.parameters()) - hidden * vocab)
    head = [*drafter.prefix_gru.parameters(), *drafter.embed_proj.parameters()]
    assert found["backbone"] == 4 * (sum(p.numel() for p in drafter.parameters()) - sum(p.numel() for p in head))
    read, gru, first, last = 3 * 16 * hidden, 3 * 16 * 16, 8 * 16, 10 * 8
    corrected = (slots - drafter.config.num_uncorrected_tokens) * (first + last)
    assert found["correction"] == 4 * (8 * hidden + slots * (read + gru) + corrected)
    drafter.set_draft_vocabulary(range(20))
    found = bytes_of_a_round(target, drafter, slots)
    assert found["output head"] == 4 * hidden * 20
    # Only the anchor's embedding is multiplied; of each draft, one row of products is read.
    assert found["correction"] == 4 * (8 * hidden + read + (slots - 1) * 3 * 16 + slots * gru + corrected)


def test_bytes_of_a_round_of_eagle3(target):
    drafter = tiny_eagle3(target, draft_vocabulary_size=20)
    found = bytes_of_a_round(target, drafter, 3)
    every_draft = sum(p.numel() for p in (*drafter.midlayer.parameters(), *drafter.norm.parameters()))
    assert found["backbone"] == 4 * (drafter.fc.weight.numel() + 3 * every_draft)
    assert found["output head"] == 4 * 3 * 20 * 32 and found.keys() == {"target", "backbone", "output head"}


# ---- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("bench")
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "domino")
    tiny_drafter(target, head="none", sample_from_anchor=False).save_pretrained(folder / "dflash")
    tiny_eagle3(target, draft_vocabulary_size=20).save_pretrained(folder / "eagle3")
    for name, count in (("one", 5), ("two", 2)):
        lines = [json.dumps({"turns": [f"w{i} w{i + 1}", "w3"][: 1 + i % 2]}) + "\n" for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run(folders, out, *arguments, sets=("one.jsonl", "b=two.jsonl")):
    files = [name.replace(own, str(folders / own)) for name in sets for own in [name.split("=")[-1]]]
    models = [f"--{name}={folders / folder}" for name, folder in (("target", "target"), ("drafter", "domino"))]
    command = ["bench", *models, "--sets", *files, "--out", str(out), "--device", "cpu", "--max-new-tokens", "20"]
    main([*command, "--num-prompts", "2", "--profile-prompts", "1", "--warmup", "1", *arguments])
    return json.loads((out / "result.json").read_text())


def test_every_method_in_one_run(folders, tmp_path, capsys):
    models = {"dflash": "dflash", "eagle3": "eagle3", "assistant": "target"}
    result = run(folders, tmp_path, *(f"--{name}={folders / folder}" for name, folder in models.items()))
    assert result["skipped"] == {}
    rows = {(row["set"], row["method"]): row for row in result["summary"]}
    assert set(rows) == {(name, method) for name in ("one", "b") for method in METHODS}
    for (_, method), row in rows.items():
        assert row["agreement"] == 1 and row["prompts"] == 2 and row["tokens_per_second"] > 0 and row["speedup"] > 0
        assert row["acceptance_length"] >= 1 and row["answers"] in (2, 3) and not isinstance(row["rounds"], list)
        assert (row["efficiency_bound_bytes"] is None) == (method not in OURS)
    assert rows["one", "assistant"]["acceptance_length"] > 3  # it is the target itself
    assert {row["method"] for row in result["profile"]} == set(METHODS)
    own = next(row for row in result["profile"] if row["method"] == "domino")
    assert all(own["ms"][part] > 0 for part in ("features", "backbone", "output head", "correction", "verify"))
    own = next(row for row in result["profile"] if row["method"] == "eagle3")
    assert all(own["ms"][part] > 0 for part in ("features", "backbone", "output head", "verify"))
    assert result["drafters"]["eagle3"]["num_draft_tokens"] == 5
    assert result["versions"]["torch"] == torch.__version__ and result["machine"]["threads"] == 1
    assert str(folders) not in (tmp_path / "result.json").read_text()  # whose home that is concerns nobody
    assert result["options"]["sets"] == ["one.jsonl", "b=two.jsonl"] and result["options"]["drafter"] == "domino"
    assert result["options"]["num_prompts"] == 2 and result["drafters"]["domino"]["block_size"] == 8
    assert result["peak_resident"] > 2**20
    said = capsys.readouterr().out
    assert "| one | Domino |" in said and "| b | prompt lookup |" in said
    assert said.splitlines()[-1] == (tmp_path / "report.md").read_text().split("\n\n!")[0].splitlines()[-1]
    assert len(list(tmp_path.glob("*.png"))) == 5


def test_a_killed_run_leaves_what_it_has(folders, tmp_path, monkeypatch):
    measure = Bench.measure_set

    def killed(self, name, *args):
        if name == "b":
            raise KeyboardInterrupt
        return measure(self, name, *args)

    monkeypatch.setattr(Bench, "measure_set", killed)
    with pytest.raises(KeyboardInterrupt):
        run(folders, tmp_path, "--methods", "plain", "domino")
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(row["set"], row["method"]) for row in result["summary"]] == [("one", "plain"), ("one", "domino")]
    main(["report", str(tmp_path / "result.json"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again" / "speedup.png").stat().st_size > 0


def test_sampled(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "PLOTS", {})
    names = ["--methods", "plain", "domino", "published-loop"]
    sampled = ["--do-sample", "True", "--temperature", "0.7", "--top-k", "0"]
    results = [run(folders, tmp_path / str(i), *names, *sampled, sets=["one.jsonl"]) for i in range(2)]
    assert results[0]["settings"]["temperature"] == 0.7 and results[0]["settings"]["do_sample"]
    assert "published-loop" in results[0]["skipped"] and "published-loop is left out" in capsys.readouterr().out
    assert all(row["agreement"] is None and row["speedup"] > 0 for row in results[0]["summary"])
    kept = [[record["kept"] for record in result["records"]] for result in results]
    assert kept[0] == kept[1]  # the seed decides


@pytest.mark.parametrize(
    "arguments, message",
    (
        (["--methods", "dflash"], "method dflash needs --dflash"),
        (["--methods", "eagle"], "no method 'eagle'"),
        (["--dflash", "domino"], "is a Domino drafter: give it as --drafter"),
        (["--drafter", "dflash"], "is a DFlash drafter: give it as --dflash"),
        (["--sets", "gsm9k"], "'gsm9k' is no prompt set: give one of gsm8k"),
        (["--sets", "a=one.jsonl", "a=two.jsonl"], "have the same name"),
    ),
)
def test_bad_arguments(folders, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(folders)
    with pytest.raises(SystemExit, match=message):
        run(folders, tmp_path, *arguments)
    assert not (tmp_path / "result.json").exists()


def test_sets_of_the_hub(monkeypatch):
    rows = {
        "openai/gsm8k": {"question": "How many {x}?", "answer": "3"},
        "HuggingFaceH4/MATH-500": {"problem": "Find $x$."},
        "openai/openai_humaneval": {"prompt": "def f():\n"},
        "google-research-datasets/mbpp": {"text": "Write."},
        "HuggingFaceH4/mt_bench_prompts": {"prompt": ["One.", "Two."]},
        "tatsu-lab/alpaca": {"instruction": "Say it.", "input": ""},
    }
    monkeypatch.setattr("datasets.load_dataset", lambda source, subset, split: [rows[source]])
    read = {name: [message["content"] for message in read_set(name)[1][0]] for name in SETS}
    steps = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert read == {
        "gsm8k": ["How many {x}?" + steps],
        "math500": ["Find $x$." + steps],
        "humaneval": ["def f():"],
        "mbpp": ["Write."],
        "mt-bench": ["One.", "Two."],
        "alpaca": ["Say it."],
    }


def test_sets_of_files(folders):
    name, conversations = read_set(str(folders / "one.jsonl"))
    assert name == "one" and len(conversations) == 5
    assert [message["content"] for message in conversations[1]] == ["w1 w2", "w3"]
    assert read_set(f"mine={folders / 'two.jsonl'}")[0] == "mine"
    with pytest.raises(FileNotFoundError):
        read_set("nowhere.jsonl")
    assert AutoTokenizer.from_pretrained(folders / "target").chat_template
