"""The notebooks and scripts of examples/ run, on tiny models and with a Hub on this machine."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from jupyter_client import KernelManager
from nbclient import NotebookClient
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_domino import DominoDrafter
from hf_domino.cli import TrainOptions
from hf_domino.evaluation.oracle import oracle
from hf_domino.training.trainer import DominoTrainingArguments

from .hub_stand_in import running_hub
from .tiny import tiny_drafter, tiny_target
from .training.test_data import END, tiny_tokenizer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
QUESTIONS = ["w1 w2 w3", "w20 w21", "w5 w6", "w40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a drafter and prompts for them."""
    folder = tmp_path_factory.mktemp("examples")
    target = tiny_target()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = END, 0
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    rows = [{"prompt": question, "number": i} for i, question in enumerate(QUESTIONS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hub" / "someone").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    return target, DominoDrafter.from_pretrained(folder / "drafter"), AutoTokenizer.from_pretrained(folder / "target")


def plain_answer(models, messages, max_new_tokens=24, **settings):
    """[T], the new tokens of plain greedy decoding."""
    target, _, tokenizer = models
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **settings)
    return output[0, inputs["input_ids"].shape[1] :]


# ---- notebooks


@pytest.fixture(scope="module")
def kernel(folder):
    """One kernel for all notebooks: each would spend most of its time on imports."""
    with running_hub(folder) as environment:
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(env={**environment, "PYTHONPATH": str(ROOT), "HF_TOKEN": "a", "OMP_NUM_THREADS": "1"})
        yield manager
        manager.shutdown_kernel(now=True)


def execute(kernel, name, folder, where, **settings):
    """What the cells of a notebook print, run with these settings in the folder `where`."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    models = {"TARGET": folder / "target", "DRAFTER": folder / "drafter", "MAX_NEW_TOKENS": 16, "OUT": where / "out"}
    settings = {key: str(value) for key, value in {**models, "PROMPTS": "", **settings}.items()}
    setup = f"%reset -f\nimport os\nos.chdir({str(where)!r})\nos.environ |= {settings!r}"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(setup))
    NotebookClient(notebook, km=kernel, timeout=300, startup_timeout=300).execute()
    outputs = [output for cell in notebook.cells[1:] for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs), outputs


def test_quickstart(kernel, folder, models, tmp_path):
    text, _ = execute(kernel, "01_quickstart", folder, tmp_path)
    question = "Mara bakes 5 trays of 12 cookies. She gives 18 away and sells the rest for $2 each. What does she earn?"
    answer = plain_answer(models, [{"role": "user", "content": question}], 16)
    assert models[2].decode(answer, skip_special_tokens=True) in text
    assert text.count("acceptance length") == 2 and "The same text, in " in text


def test_training(kernel, folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16).save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(folder / "target").save_pretrained(tmp_path / "target")
    settings = {"TARGET": tmp_path / "target", "PROMPTS": folder / "prompts.jsonl"}
    settings |= {"NUM_EPOCHS": 2, "MAX_NEW_TOKENS": 12}
    text, _ = execute(kernel, "02_train_a_drafter", folder, tmp_path, **settings)
    assert "3 conversations to train on, 1 held out" in text
    assert "base_acceptance_length on held-out prompts: " in text and "  acceptance: " in text  # the doctor's line
    drafter = AutoModel.from_pretrained(tmp_path / "out")
    assert type(drafter) is DominoDrafter and drafter.config.num_hidden_layers == 2


def test_training_on_its_own_prompts(kernel, folder, tmp_path):
    settings = {"NUM_PROMPTS": 4, "NUM_EPOCHS": 1, "MAX_NEW_TOKENS": 12}
    text, _ = execute(kernel, "02_train_a_drafter", folder, tmp_path, **settings)
    assert "4 prompts, the first one: [{'role': 'user', 'content': '" in text and "How many" in text


def test_bench(kernel, folder, tmp_path):
    text, outputs = execute(kernel, "03_bench_and_plots", folder, tmp_path, DTYPE="float32")
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 5
    assert "same tokens as plain 1.0" in text and "tokens kept in each round: [" in text
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {record["method"] for record in result["records"]} == {"plain", "domino", "domino-base", "prompt-lookup"}


def test_push_and_pull(kernel, folder, tmp_path):
    settings = {"REPO": "someone/drafter", "TARGET_ID": "someone/target"}
    text, _ = execute(kernel, "04_push_and_pull", folder, tmp_path, **settings)
    repository = folder / "hub" / "someone" / "drafter"
    assert {"README.md", "config.json", "model.safetensors", "modeling_domino.py"} <= set(os.listdir(repository))
    card = (repository / "README.md").read_text()
    assert card.strip() in text and "license: apache-2.0" in card and "two word problems" in card
    assert "someone/drafter-that-is-not-there" in text


# ---- scripts


def run_script(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def small(folder):
    return ["--target", folder / "target", "--drafter", folder / "drafter", "--dtype", "float32", "--device", "cpu"]


def test_chat(folder, models, monkeypatch, capsys):
    lines = iter([*QUESTIONS[:3], ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    run_script(monkeypatch, "chat.py", *small(folder), "--max-new-tokens", 24)
    out, messages = capsys.readouterr().out, []
    for question in QUESTIONS[:3]:
        messages.append({"role": "user", "content": question})
        answer = models[2].decode(plain_answer(models, messages), skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        assert answer in out
    assert out.count(" tokens a round, ") == 3


@pytest.mark.parametrize("is_forgetful", (False, True), ids=("continued", "template that rewrites"))
def test_chat_goes_on_with_the_cache_where_it_can(folder, models, monkeypatch, is_forgetful):
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    script = run_script(monkeypatch, "chat.py", *small(folder))
    no_special = {"suppress_tokens": list(range(8))}  # a template leaves them out of earlier turns
    chat = script["Chat"](*models, do_sample=False, max_new_tokens=24, **no_special)
    seen = []
    forward = models[0].forward
    monkeypatch.setattr(models[0], "forward", lambda *a, **k: seen.append(k["input_ids"].shape[1]) or forward(*a, **k))
    messages = []
    for question in QUESTIONS[:2]:
        messages.append({"role": "user", "content": question})
        expected = plain_answer(models, messages, **no_special)
        with oracle(expected):
            seen.clear()
            answer = chat.answer(question)
        assert answer == models[2].decode(expected, skip_special_tokens=True)
        if is_forgetful and len(messages) == 1:
            chat.messages[-1]["content"] = answer = "w1"
        messages.append({"role": "assistant", "content": answer})
    prompt = models[2].apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert (seen[0] == len(prompt)) == is_forgetful and len(seen) <= 5


def test_batch_file(folder, models, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    command = [folder / "prompts.jsonl", out, *small(folder), "--max-new-tokens", 24]
    run_script(monkeypatch, "batch_file.py", *command)
    whole = out.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        answer = plain_answer(models, [{"role": "user", "content": row["prompt"]}])
        assert row["answer"] == models[2].decode(answer, skip_special_tokens=True) and row["new_tokens"] == len(answer)
    # Killed within the third line.
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:9])
    run_script(monkeypatch, "batch_file.py", *command)
    assert out.read_bytes() == whole
    out.write_bytes(lines[0][:5])
    assert run_script(monkeypatch, "batch_file.py", *command)["finished_rows"](out) == 4
    assert out.read_bytes() == whole


def launch_environment(folder, out):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    names = {"TARGET": folder / "target", "PROMPTS": folder / "prompts.jsonl", "OUT": out, "MAX_NEW_TOKENS": 16}
    environment = {**os.environ, "PATH": path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, **names}
    return {name: str(value) for name, value in environment.items()}


def test_launch_commands_are_understood(folder, tmp_path):
    """What the script would run, by the parsers of accelerate and of hf-domino."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "accelerate"):
        recorder = tmp_path / "bin" / name
        recorder.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{tmp_path}/{name}.txt"\n')
        recorder.chmod(0o755)
    environment = launch_environment(folder, tmp_path / "out")
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    script = EXAMPLES / "launch_training.sh"
    subprocess.run(["bash", script, "--max_steps", "3"], env=environment, check=True)
    regenerate, launch = ((tmp_path / f"{name}.txt").read_text().splitlines() for name in ("python", "accelerate"))
    assert regenerate[:3] == ["-m", "hf_domino.cli", "regenerate"] and f"{tmp_path / 'out'}-answers" in regenerate
    assert launch[0] == "launch"
    args = launch_command_parser().parse_args(launch[1:])
    assert args.module and args.training_script == "hf_domino.cli" and args.num_processes == 2
    command, *options = args.training_script_args
    options, training = HfArgumentParser([TrainOptions, DominoTrainingArguments]).parse_args_into_dataclasses(options)
    assert command == "train" and options.from_target and options.target == str(folder / "target")
    assert training.max_steps == 3

    del environment["PROMPTS"]
    refused = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert refused.returncode and "PROMPTS: must be a JSONL" in refused.stderr


@pytest.mark.slow
def test_launch_trains_with_two_processes(folder, tmp_path):
    script = [EXAMPLES / "launch_training.sh", "--use_cpu", "true", "--max_steps", "2", "--eval_size", "1"]
    sizes = "--block_size 4 --num_anchors 4 --num_hidden_layers 1 --per_device_train_batch_size 1".split()
    done = subprocess.run(
        ["bash", *script, *sizes], env=launch_environment(folder, tmp_path / "out"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafter = AutoModel.from_pretrained(tmp_path / "out")
    assert type(drafter) is DominoDrafter and drafter.config.block_size == 4
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())
    assert recipe["data"]["conversations"] == 4
    assert all(torch.isfinite(tensor).all() for tensor in drafter.state_dict().values())
