"""The benchmark scripts run, at a tiny size."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_domino import modeling_domino, track_acceptance
from hf_domino.assisted_generation import _CACHE

from .tiny import MASK, tiny_drafter, tiny_target

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and its tokenizer, one printable character for each token."""
    folder = tmp_path_factory.mktemp("target")
    backend = Tokenizer(models.BPE({**{chr(32 + i): i for i in range(95)}, "<pad>": 95, "<mask>": 96}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content[:20] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    tiny_target().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("with_drafter", (False, True), ids=("oracle", "drafter"))
def test_round_time(folder, tmp_path, with_drafter):
    command = [sys.executable, ROOT / "benchmarks" / "round_time.py", "--target", folder, "--dtype", "float32"]
    command += [
        "--num-prompts",
        "2",
        "--max-new-tokens",
        "24",
        "--variants",
        "all/all",
        "4/20",
        "--out",
        tmp_path / "r",
    ]
    if with_drafter:
        tiny_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
        command += ["--drafter", tmp_path / "drafter"]
    else:
        command += ["--block-sizes", "4", "--oracle-rate", "1.0", "--shape", folder / "config.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr
    results = json.loads((tmp_path / "r").read_text())["results"]
    assert len(results) == 2 and "plain:" in out.stdout and "assisted:" in out.stdout
    for result in results.values():
        assert result["prompts_with_the_same_tokens"] == 2
        assert result["acceptance_length"] >= (1 if with_drafter else 4)
        assert all(value > 0 for name, value in result["ms"].items() if name != "rest")


def test_shortlist(folder, tmp_path):
    """A shortlist of nearly all tokens changes little, one of two tokens much, of all tokens nothing."""
    drafter = tiny_drafter(tiny_target())
    with torch.no_grad():
        drafter.embed_proj[2].weight.mul_(20)
    drafter.set_draft_vocabulary(range(40))
    drafter.save_pretrained(tmp_path / "drafter")
    command = [sys.executable, ROOT / "benchmarks" / "shortlist.py", "--target", folder, "--dtype", "float32"]
    command += ["--drafter", tmp_path / "drafter", "--num-prompts", "1", "--max-new-tokens", "24", "--device", "cpu"]
    command += ["--candidates", "2", "97", "--out", tmp_path / "r"]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert out.returncode == 0, out.stderr
    result = json.loads((tmp_path / "r").read_text())
    assert result["rounds"] > 10 and result["share_of_blocks_that_differ"]["97"] == 0
    assert result["share_of_blocks_that_differ"]["2"] > 0.5
    assert set(result["acceptance_length"]) == {"all", "2", "97", "all of 40 tokens", "2 of 40 tokens"}
    assert result["acceptance_length"]["97"] == result["acceptance_length"]["all"]


def test_carried_over_to_another_vocabulary(folder):
    """The tokens in another order and one more, made of two: the same text from other ids, drafted as before."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = {**{token: 96 - i for token, i in tokenizer.get_vocab().items()}, "ab": 97}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.decoder = decoders.Fuse()
    other = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>")
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.set_draft_vocabulary(range(40))
    carried, new_drafter, _ = load("shortlist").carry_over(target, drafter, tokenizer, other, 120)
    for new, old in (
        (carried.get_input_embeddings().weight, target.get_input_embeddings().weight),
        (carried.get_output_embeddings().weight, target.get_output_embeddings().weight),
        (new_drafter.embed_proj[2].weight, drafter.embed_proj[2].weight),
    ):
        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
        assert len(new) == 120 and torch.equal(new[:97].flip(0), old[:97])
        assert torch.allclose(new[97], old[[a, b]].mean(0)) and not new[98:119].any()
    assert torch.equal(carried.get_input_embeddings().weight[119], target.get_input_embeddings().weight[MASK])

    texts = []
    for model, its_drafter, its_tokenizer in ((target, drafter, tokenizer), (carried, new_drafter, other)):
        inputs = its_tokenizer("Some prompt", return_tensors="pt", return_token_type_ids=False)
        its_drafter.set_draft_vocabulary(None)
        with track_acceptance() as acceptance:
            output = model.generate(
                **inputs, assistant_model=its_drafter, max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        texts.append((its_tokenizer.decode(output[0]), acceptance.histogram))
    assert texts[0] == texts[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_round():
    return load("gpu_round")


def test_gpu_round(gpu_round, tmp_path, capsys, monkeypatch):
    command = "gpu_round.py --size tiny --device cpu --dtype float32 --contexts 16 --modes eager compiled graph"
    command += f" --backend eager --seconds 0.005 --out {tmp_path / 'r'}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setitem(gpu_round.SIZES["tiny"], "candidates", [4])  # compiling takes its time
    gpu_round.main()
    result, printed = json.loads((tmp_path / "r").read_text()), capsys.readouterr().out
    rows = result["rows"]
    for row in rows:
        if row["mode"] == "graph":
            assert row["failed"] == "a CUDA graph needs a CUDA device"
        else:
            assert row["ms"] > 0 and row["share_of_bandwidth"] > 0 and row["difference"] < 1e-5, row
    assert "left out: a CUDA graph needs a CUDA device" in printed
    assert {row["part"] for row in rows} >= {"drafting", "drafter.compile()", "target, growing cache"}
    # One token reads every weight but the embeddings, and what is cached.
    target = tiny_target(num_hidden_layers=3)
    read = 4 * (sum(p.numel() for p in target.parameters()) - 97 * 32 + 3 * 2 * 2 * 8 * 17)
    assert [row["bytes"] for row in rows if row["part"] == "target" and row["tokens"] == 1 and "ms" in row] == [read]
    rounds = result["rounds"]
    assert {row["mode"] for row in rounds} == {"eager", "compiled"} and len(rounds) == 2 * 2
    for row in rounds:
        ms = row["ms"]
        parts = sum(ms[part] for part in ("features", "backbone", "output head", "correction"))
        assert ms["drafting"] == pytest.approx(parts)
        assert row["efficiency"] == pytest.approx(ms["plain pass"] / (parts + ms["verify"]))
        assert row["efficiency"] < row["efficiency_bound"] and 0 < row["efficiency_bound_bytes"] < 1
        assert row["projected_speedup"]["GSM8K"] == pytest.approx(10.03 * row["efficiency"])
    # Smaller is less to read.
    by_bytes = {row["vocabulary"]: row["efficiency_bound_bytes"] for row in rounds}
    assert by_bytes[20] > by_bytes[None]


def test_a_part_that_fails_is_a_row(gpu_round, capsys):
    measure = gpu_round.Measurement(torch.device("cpu"), 1e9, budget=-1, backend="eager", seconds=0.01)
    measure("a part", lambda: (lambda: torch.ones(2), 8), ["compiled", "eager"], context=1)
    measure("another", lambda: (lambda: torch.ones(2) @ torch.ones(3), 8), ["eager"])
    first, second, third = measure.rows
    assert first["failed"] == "the time for it is used up; raise --budget"
    assert second["ms"] > 0 and second["bytes"] == 8 and second["difference"] == 0
    assert second["share_of_bandwidth"] == pytest.approx(8 / (second["ms"] / 1e3) / 1e9)
    assert third["failed"].startswith("RuntimeError: ") and "ms" not in third
    assert capsys.readouterr().out.count("left out: ") == 2


def test_a_pass_behind_a_fixed_context_is_one_behind_a_grown_one(gpu_round):
    setting = gpu_round.Setting(gpu_round.SIZES["tiny"], torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for count in (1, 5):
            call, grown = (setting.target_pass(16, count, grows=grows)[0] for grows in (False, True))
            fixed, grown = (inspect.getclosurevars(one).nonlocals for one in (call, grown))
            for layer, other in zip(fixed["inputs"][_CACHE].layers, grown["cache"].layers):
                layer.keys[..., :16, :], layer.values[..., :16, :] = other.keys, other.values
            logits = setting.target(fixed["ids"], use_cache=True, **{_CACHE: grown["cache"]}).logits
            for _ in range(2):  # and again
                torch.testing.assert_close(call(), logits)


class NoHost(TorchDispatchMode):
    """Lets tensors of the meta device pass only: those hold no numbers that a host could wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, function
        return result


def test_every_part_could_be_a_graph(gpu_round, monkeypatch):
    """None waits for the device, and none brings numbers from the host: a CUDA graph may hold neither."""
    monkeypatch.setattr(modeling_domino, "check_draft_vocabulary", lambda *args: None)  # it looks at the numbers
    setting = gpu_round.Setting(gpu_round.SIZES["tiny"], torch.device("meta"), torch.bfloat16)
    parts = [setting.target_pass(16, 1), setting.target_pass(16, 5), setting.features(), setting.backbone(16)]
    for vocabulary, candidates in product((None, 20), (None, 4)):
        parts += [setting.output_head(vocabulary), setting.correction(candidates, vocabulary)]
        parts += [setting.drafting(16, candidates, vocabulary)]
    read = [
        setting.correction(candidates, vocabulary)[1] for candidates, vocabulary in ((None, None), (None, 20), (4, 20))
    ]
    assert read == sorted(read, reverse=True)
    with torch.no_grad(), NoHost():
        for call, _ in parts:
            assert call().numel()
    with pytest.raises(AssertionError), NoHost():
        torch.ones(2, device="meta") + torch.ones(2)


def test_the_published_shapes(gpu_round):
    setting = gpu_round.Setting(gpu_round.SIZES["published"], torch.device("meta"), torch.bfloat16)
    # The sizes that the checkpoints' authors state.
    assert setting.target.num_parameters() == pytest.approx(8.19e9, rel=0.01)
    assert setting.drafter.num_parameters() == pytest.approx(1.105e9, rel=0.01)
    assert setting.block == 17 and setting.drafter.config.num_draft_tokens == 16
