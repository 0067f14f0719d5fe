"""The drafters that ship: their folders load, and what card and README say is what the committed result says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from hf_domino import DominoDrafter
from hf_domino.hub import write_card

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
RESULT = ROOT / "benchmarks" / "results" / "smollm2" / "result.json"
TRAINING = RESULT.with_name("training.json")
ROWS = ("domino", "domino-adaptive", "domino-base", "dflash")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_shipped_folder(folder):
    drafter = AutoModel.from_pretrained(folder)
    assert type(drafter) is DominoDrafter and drafter.dtype == torch.bfloat16
    assert (folder / "model.safetensors").stat().st_size < 50e6
    assert all(parameter.isfinite().all() and parameter.count_nonzero() for parameter in drafter.parameters())
    for file in (path for path in folder.iterdir() if path.suffix != ".safetensors"):
        assert "/tmp/" not in file.read_text() and "/root" not in file.read_text()


def test_the_card_is_the_one_that_its_command_writes(tmp_path):
    folder = ROOT / "model_cards" / "SmolLM2-135M-Instruct-Domino-b8"
    for name in ("config.json", "training_recipe.json", "trainer_state.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    about = {"target": "HuggingFaceTB/SmolLM2-135M-Instruct", "name": folder.name, "license": "apache-2.0"}
    written = write_card(tmp_path, results=RESULT, **about)
    assert written.read_text() == (folder / "README.md").read_text()


def test_the_readme_has_the_numbers_of_the_result():
    result, readme = json.loads(RESULT.read_text()), (ROOT / "README.md").read_text()
    rows = {(row["set"], row["method"]): row for row in result["summary"]}
    for name in dict.fromkeys(row["set"] for row in result["summary"]):
        lengths = " | ".join(f"{rows[name, method]['acceptance_length']:.2f}" for method in ROWS)
        speedups = " | ".join(f"{rows[name, method]['speedup']:.2f}" for method in ROWS)
        assert f"| {name} | {lengths} | {speedups} |" in readme


def test_the_readme_has_the_walk_of_the_training_result():
    readme, walk = (ROOT / "README.md").read_text(), json.loads(TRAINING.read_text())["walk"]
    for name, lengths in walk.items():
        cells = " | ".join(f"{lengths[method]:.2f}" for method in ("domino", "domino-base", "dflash"))
        assert f"| {name.replace('_', '-')} | {cells} |\n" in readme
