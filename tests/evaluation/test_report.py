"""The report: each plot is drawn, the table says what the results say, and several machines become one."""

import copy
import json
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from hf_domino.cli import main
from hf_domino.evaluation import report
from hf_domino.evaluation.report import PLOTS, histogram, kept_by_position, merge, table, write_report

KEPT = {"plain": [1] * 6, "domino": [4, 1, 3, 5, 2], "prompt-lookup": [1, 2, 1]}


def a_result(cpu="A CPU", threads=2, sets=("gsm8k", "mt-bench"), faster=1.0):
    """A result file's content, as two prompts of each set might give it."""
    records, summary, profile = [], [], []
    for name in sets:
        for number, (method, kept) in enumerate(KEPT.items()):
            drafted = [0 if method == "plain" else 4] * len(kept)
            for prompt in range(2):
                own = {"set": name, "method": method, "prompt": prompt, "turn": 0, "kept": kept, "drafted": drafted}
                records.append({**own, "tokens": 1 + sum(kept), "stopped": False})
            tau, speedup = sum(kept) / len(kept), 1 + 0.5 * number * faster
            row = {"set": name, "method": method, "prompts": 2, "agreement": 1.0, "slowest": speedup - 0.1}
            row |= {"acceptance_length": tau, "acceptance_length_low": tau - 0.2, "acceptance_length_high": tau + 0.3}
            row |= {"acceptance_length_per_prompt": tau}
            row |= {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.3}
            row |= {"tokens_per_second": 10 * speedup, "efficiency": speedup / tau, "efficiency_bound": 0.9}
            summary.append({**row, "efficiency_bound_bytes": None, "peak_memory": None})
            parts = {"verify": 20.0, "rest": 1.0} | ({"backbone": 4.0, "correction": 6.0} if method == "domino" else {})
            profile.append({"set": name, "method": method, "rounds": 5, "ms": parts})
    conditions = {"dtype": "bfloat16", "attention": "sdpa", "cache": "DynamicCache", "max_new_tokens": 99}
    return {
        "machine": {"device": "cpu", "cpu": cpu, "threads": threads, "system": "Linux x86_64"},
        "versions": {"hf_domino": "0.1.0", "torch": "2.13.0"},
        "target": "someone/a-target",
        "settings": {"max_new_tokens": 99, "do_sample": False},
        "conditions": {method: dict(conditions) for method in KEPT},
        "skipped": {"stock-dflash": "it can't."},
        "peak_resident": 3 * 2**30,
        "records": records,
        "summary": summary,
        "profile": profile,
    }


def area(image, colour):
    """Pixels that have a colour."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(image[..., :3] - wanted) < 1e-3).all(axis=-1).sum())


def test_each_plot_is_drawn(tmp_path):
    write_report([a_result()], tmp_path)
    assert {file.stem for file in tmp_path.glob("*.png")} == set(PLOTS)
    for name in PLOTS:
        image = imread(tmp_path / f"{name}.png")
        wanted = [report.COLOURS["domino"], report.COLOURS["prompt-lookup"]]
        if name == "round_time":
            wanted = [report.PART_COLOURS[part] for part in ("backbone", "correction", "verify", "rest")]
        for colour in wanted:
            assert area(image, colour) > 100, (name, colour)
    text = (tmp_path / "report.md").read_text()
    assert all(f"]({name}.png)" in text for name in PLOTS)


def test_bars_and_lines_are_the_numbers():
    machines = merge([a_result()])
    (axis,) = PLOTS["speedup"](machines, Figure).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers if len(bars) == 2}
    assert heights["Domino"] == [1.5, 1.5] and heights["prompt lookup"] == [2.0, 2.0] and "plain" not in heights
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["gsm8k", "mt-bench"]
    axes = PLOTS["round_time"](machines, Figure).axes
    assert [axis.get_title() for axis in axes] == ["gsm8k", "mt-bench"]
    verify = next(bars for bars in axes[0].containers if bars.get_label() == "verify")
    assert [(bar.get_x(), bar.get_width()) for bar in verify] == [(0, 20), (10, 20), (0, 20)]
    lines = {line.get_label(): line for line in PLOTS["acceptance_histogram"](machines, Figure).axes[0].lines}
    assert list(lines["Domino"].get_ydata()) == [0.2] * 5 and set(lines) == {"Domino", "prompt lookup"}


def test_shares():
    rounds = [(1, 4), (3, 4), (5, 4), (2, 2), (1, 0)]
    assert histogram(rounds) == ([1, 2, 3, 4, 5], [0.4, 0.2, 0.2, 0.0, 0.2])
    # Of four rounds with a first draft three kept it; the fourth was drafted in three of them.
    assert kept_by_position(rounds) == ([1, 2, 3, 4], [3 / 4, 2 / 4, 1 / 3, 1 / 3])


def test_table():
    text = table(merge([a_result()]))
    assert (
        "- A CPU, 2 threads: target a-target, greedy" in text and "DFlash, transformers is left out: it can't." in text
    )
    same = "dtype bfloat16, attention sdpa, cache DynamicCache, max new tokens 99"
    assert f"the same for all methods: {same}" in text and "peak resident memory, all methods loaded: 3.00 GiB" in text
    row = "| gsm8k | Domino | 3.00 [2.80, 3.30] | 3.00 | 1.50 [1.40, 1.80] | 1.40 | 15.0 | 0.50 | 0.90 |  | 100% | 2 |"
    assert row in text.splitlines()
    assert "| gsm8k | Domino |  | 4.0 |  | 6.0 |  | 20.0 | 1.0 | 31.0 |" in text.splitlines()


def test_several_machines_become_one_table(tmp_path):
    results = [a_result(), a_result("Another CPU", threads=1, sets=["gsm8k"], faster=2.0)]
    text = write_report(results, tmp_path)
    lines = text.splitlines()
    assert "| machine | set | method | tau |" in text
    assert any(line.startswith("| A CPU, 2 threads | mt-bench | Domino | 3.00") for line in lines)
    start = "| Another CPU, 1 thread | gsm8k | Domino | 3.00 [2.80, 3.30] | 3.00 | 2.00"
    assert any(line.startswith(start) for line in lines)
    machines = merge(results)
    titles = [axis.get_title() for axis in PLOTS["speedup"](machines, Figure).axes]
    assert titles == ["A CPU, 2 threads", "Another CPU, 1 thread"]
    assert len(PLOTS["kept_by_position"](machines, Figure).axes) == len(PLOTS["round_time"](machines, Figure).axes) == 3


def test_sets_of_one_machine_are_joined_and_later_results_count(caplog):
    first, second = a_result(sets=["gsm8k"]), a_result(sets=["mt-bench"])
    assert table(merge([first, second])).count("| Domino |") == 4 and not caplog.records
    again = a_result(sets=["gsm8k"], faster=3.0)
    machines = merge([first, second, again])
    assert "several results for plain on gsm8k" in caplog.text
    assert [row["speedup"] for row in report.rows_of(machines["A CPU, 2 threads"], "summary").values()][1] == 2.5
    # Another dtype is no later result of the same.
    other = copy.deepcopy(first)
    for one in other["conditions"].values():
        one["dtype"] = "float32"
    assert list(merge([first, other])) == ["A CPU, 2 threads, bfloat16", "A CPU, 2 threads, float32"]
    gpu = copy.deepcopy(first)
    gpu["machine"]["device"] = "NVIDIA A100"
    gpu["summary"][1]["peak_memory"] = 2**31
    said = table(merge([gpu]))
    assert "- NVIDIA A100: target" in said and "on the device, all methods loaded: Domino 2.00 GiB" in said


def test_without_plain_decoding_there_is_no_speedup(tmp_path):
    result = a_result()
    for row in result["summary"]:
        row |= dict.fromkeys(("speedup", "speedup_low", "speedup_high", "slowest", "efficiency", "agreement"))
        row["acceptance_length_low"] = row["acceptance_length_high"] = None
    result["profile"] = []
    write_report([result], tmp_path)
    drawn = {file.stem for file in tmp_path.glob("*.png")}
    assert drawn == {"acceptance_length", "acceptance_histogram", "kept_by_position"}
    text = (tmp_path / "report.md").read_text()
    assert "speedup.png" not in text and "| gsm8k | Domino | 3.00 | 3.00 |  |  | 15.0 |" in text


def test_the_command(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, cpu in zip(files, ("One", "Two")):
        file.write_text(json.dumps(a_result(cpu)))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(SystemExit, match="report.md is there; the plots need matplotlib"):
            main(["report", *map(str, files), "--out", str(tmp_path / "out")])
    assert "| Two, 2 threads | gsm8k |" in (tmp_path / "out" / "report.md").read_text()
    monkeypatch.setattr(report, "PLOTS", {})
    main(["report", "--results", *map(str, files), "--out", str(tmp_path / "out")])
    assert "| One, 2 threads | gsm8k |" in capsys.readouterr().out
    for bad in ("[]", "{}", "{", '{"summary": []}'):
        files[0].write_text(bad)
        with pytest.raises(SystemExit, match="hf-domino: "):
            main(["report", str(files[0]), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="nowhere.json"):
        main(["report", "nowhere.json", "--out", str(tmp_path / "out")])
