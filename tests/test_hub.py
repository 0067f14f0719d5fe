"""The card of a drafter: true, complete, runnable as printed; and the way to the Hub with it."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel

import hf_domino
from hf_domino.hub import model_card, write_card

from .hub_stand_in import run_beside_a_hub
from .tiny import tiny_drafter, tiny_eagle3, tiny_target
from .training.test_data import END, tiny_tokenizer

TARGET, DRAFTER = "someone/a-target", "someone/a-drafter"
CURVE = [
    {"step": step, "eval_acceptance_length": 1 + step / 10, "eval_base_acceptance_length": 1 + step / 20}
    for step in range(1, 31)
]
RECIPE = {
    "options": {"target": TARGET, "license": "apache-2.0", "from_target": True, "init_from": None},
    "arguments": {"learning_rate": 0.0006, "max_steps": -1, "num_train_epochs": 3, "decay": "None", "bf16": False},
    "data": {"conversations": 12, "held_out": 3},
    "answers": {"do_sample": False, "use_cache": True, "top_p": None},
    "sequences_per_step": 16,
    "target_revision": "0123abc",
}


def saved_drafter(folder, **overrides):
    drafter = tiny_drafter(tiny_target(), **overrides)
    drafter.save_pretrained(folder)
    return drafter


def tables(card):
    """The tables of a card, each a list of rows of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", card.text, flags=re.MULTILINE)
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()] for block in blocks]


@pytest.mark.parametrize(("revision", "make"), [(None, tiny_drafter), ("0123abc", tiny_drafter), (None, tiny_eagle3)])
def test_the_usage_code_runs_as_printed(tmp_path, capsys, revision, make):
    target = tiny_target()
    make(target).save_pretrained(tmp_path / "drafter")
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = 0
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    card = write_card(tmp_path / "drafter", target=TARGET, name=DRAFTER, revision=revision).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    for name, folder in ((TARGET, "target"), (DRAFTER, "drafter")):
        code = code.replace(f'"{name}"', repr(str(tmp_path / folder)))
    done = {}
    exec(code, done)
    plain = done["target"].generate(**done["inputs"], max_new_tokens=128)
    assert torch.equal(done["output"], plain)
    assert capsys.readouterr().out.endswith(f"{done['acceptance'].mean}\n")
    assert done["acceptance"].lengths


def test_what_was_measured_is_in_the_index_and_in_the_text():
    gsm8k = {"acceptance_length": 2.91234, "base_acceptance_length": 2.4, "dataset": "openai/gsm8k", "prompts": 40}
    config = tiny_drafter(tiny_target()).config
    before = json.dumps(gsm8k)
    card = model_card(
        config,
        target=TARGET,
        name=DRAFTER,
        revision="0123abc",
        license="mit",
        recipe=RECIPE,
        curve=[{"step": 1, "loss": 3.0}, *CURVE, CURVE[-1]],
        acceptance={"gsm8k": gsm8k, "mbpp": 2},
        speed={"gsm8k": {"speedup": 1.4, "machine": "2 cores"}},
    )
    assert json.dumps(gsm8k) == before
    found = {(r.dataset_type, r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("held-out conversations", "held-out conversations", "acceptance_length"): 4.0,
        ("held-out conversations", "held-out conversations", "base_acceptance_length"): 2.5,
        ("openai/gsm8k", "gsm8k", "acceptance_length"): 2.912,
        ("openai/gsm8k", "gsm8k", "base_acceptance_length"): 2.4,
        ("openai/gsm8k", "gsm8k", "speedup"): 1.4,
        ("mbpp", "mbpp", "acceptance_length"): 2,
    }
    data = yaml.safe_load(str(card).split("---\n")[1])
    assert data["model-index"][0]["name"] == DRAFTER and data["base_model"] == TARGET and data["license"] == "mit"
    assert {"domino", "hf_domino", "speculative-decoding"} == set(data["tags"])
    shape, acceptance, recipe, curve = tables(card)
    for table in (shape, acceptance, recipe, curve):
        assert len({len(row) for row in table}) == 1, table
    assert acceptance[2:] == [
        ["held-out conversations", "4.00", "2.50", "", "by a walk through the target's answers"],
        ["gsm8k", "2.91", "2.40", "1.40", "prompts 40, machine 2 cores"],
        ["mbpp", "2.00", "", "", ""],
    ]
    recipe = dict(recipe[2:])
    assert recipe == {
        "conversations": "12",
        "held out": "3",
        "answers: do_sample": "False",
        "sequences a step": "16",
        "from_target": "True",
        "num_train_epochs": "3",
        "learning_rate": "0.0006",
    }
    assert 6 < len(curve) <= 14 and curve[-1] == ["30", "4.000", "2.500"]
    assert "revision `0123abc`" in card.text and "8 slots, 8 of them drafted" in card.text


def test_a_card_of_little_says_little(tmp_path, monkeypatch):
    drafter = saved_drafter(tmp_path / "dflash", head="none", sample_from_anchor=False)
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    card = ModelCard.load(write_card("dflash", target="target", license=None))
    assert len(tables(card)) == 1 and "Not measured yet." in card.text and "Not stated by its author." in card.text
    assert "[DFlash]" in card.text and "dflash" in card.data.tags and "8 slots, 7 of them drafted" in card.text
    # A folder is no model on the Hub.
    assert card.data.base_model is None and card.data.license is None and card.data.eval_results is None
    assert f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} million, float32" in card.text
    drafter.set_draft_vocabulary(range(50))
    assert "50 of 97 tokens" in model_card(drafter.config, target=TARGET).text
    assert not re.search(r"{[{%]|\bNone\b|undefined", card.text)


@pytest.mark.parametrize("layers", [[2, 0, 1], None])
def test_the_card_of_an_eagle3_drafter(tmp_path, layers):
    drafter = tiny_eagle3(tiny_target(), target_layer_ids=layers, draft_vocabulary_size=23)
    drafter.save_pretrained(tmp_path)
    result = bench_result()
    result["drafters"]["eagle3"] = {"dtype": "float32", "block_size": None, "draft_vocabulary_size": 23}
    result["summary"].append({"set": "gsm8k", "method": "eagle3", "acceptance_length": 2.7, "speedup": 1.6})
    (tmp_path / "result.json").write_text(json.dumps(result))
    card = ModelCard.load(write_card(tmp_path, target=TARGET, results=tmp_path / "result.json"))
    about, acceptance = tables(card)
    assert about[2:] == [
        ["layers", "1 of width 32"],
        ["drafts", "a chain of 5, each from the one before"],
        ["reads", f"the outputs of target layers {'2, 0, 1' if layers else '1, L / 2 - 1, L - 4 of L'} (from 0)"],
        ["parameters", f"{drafter.num_parameters() / 1e6:.1f} million, float32"],
        ["drafts from", "23 of 97 tokens"],
    ]
    assert acceptance[2][:3] == ["gsm8k", "2.70", "1.60"] and "eagle3" in card.data.tags
    assert "An [EAGLE-3]" in card.text and "embeddings are the target's" in card.text
    assert not re.search(r"{[{%]|\bNone\b|undefined", card.text)


def test_the_folder_of_a_run_says_the_rest(tmp_path):
    saved_drafter(tmp_path)
    (tmp_path / "training_recipe.json").write_text(json.dumps(RECIPE))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": CURVE}))
    card = ModelCard.load(write_card(tmp_path))
    assert card.data.base_model == TARGET and card.data.license == "apache-2.0"
    assert card.data.eval_results[0].metric_value == 4.0 and "0123abc" in card.text
    # Another name for the target, another revision.
    card = ModelCard.load(write_card(tmp_path, target="someone/a-copy"))
    assert card.data.base_model == "someone/a-copy" and "0123abc" not in card.text


def test_a_card_by_other_hands_stays(tmp_path):
    saved_drafter(tmp_path)
    path = write_card(tmp_path, target=TARGET)
    write_card(tmp_path, target=TARGET, license="mit")
    ours = path.read_text()
    for other in (
        ours.replace("## Limits", "## Limits\n\nMine."),
        f"{ours}\nMine.\n",
        "---\n---\nMine.\n",
        "",
        "\n<!--",
    ):
        path.write_text(other)
        with pytest.raises(FileExistsError, match=r"README.md was not written by hf_domino, or was edited since"):
            write_card(tmp_path, target=TARGET)
        assert path.read_text() == other
    assert write_card(tmp_path, target=TARGET, license="mit", overwrite=True).read_text() == ours
    path.write_bytes(b"# Caf\xe9, in Latin-1")
    with pytest.raises(FileExistsError, match="was not written by hf_domino"):
        write_card(tmp_path, target=TARGET)


def test_no_card_without_a_drafter_and_its_target(tmp_path):
    with pytest.raises(ValueError, match="holds no drafter that hf_domino saved"):
        write_card(tmp_path, target=TARGET)
    tiny_target().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no drafter that hf_domino saved"):
        write_card(tmp_path, target=TARGET)
    saved_drafter(tmp_path)
    with pytest.raises(ValueError, match="does not say which target the drafter is for"):
        write_card(tmp_path)
    assert not (tmp_path / "README.md").exists()


def bench_result(**drafter):
    """What `hf-domino bench` writes, as far as a card reads it."""
    rows = [
        ("gsm8k", "plain", None, 1.0),
        ("gsm8k", "domino", 2.91234, 1.9),
        ("gsm8k", "domino-base", 2.2, 1.7),
        ("gsm8k", "dflash", 2.4, 1.8),
        ("gsm8k", "prompt-lookup", 1.2, 1.1),
        ("own", "domino", 1.5, None),
        ("own", "dflash", None, None),
        ("unmeasured", "dflash", 2.0, 1.5),
    ]
    names = ("set", "method", "acceptance_length", "speedup")
    shape = {"block_size": 8, "num_hidden_layers": 2, "draft_vocabulary_size": None, **drafter}
    return {
        "machine": {"device": "a device"},
        "settings": {"do_sample": False, "max_new_tokens": 64},
        "drafters": {
            "domino": {"dtype": "float32", "name": "x", **shape},
            "dflash": {"dtype": "float16", "name": "/home/someone/dflash", **shape},
        },
        "summary": [{**dict(zip(names, row)), "prompts": 32, "tokens_per_second": 9.0} for row in rows],
    }


def test_a_bench_result_is_the_acceptance(tmp_path):
    saved_drafter(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(bench_result()))
    card = ModelCard.load(write_card(tmp_path, target=TARGET, results=tmp_path / "result.json"))
    how = {"prompts": 32, "decoding": "greedy", "room": 64, "dtype": "float32", "machine": "a device"}
    how["dflash"] = "dflash"
    found = {(r.dataset_type, r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("openai/gsm8k", "gsm8k", "acceptance_length"): 2.912,
        ("openai/gsm8k", "gsm8k", "base_acceptance_length"): 2.2,
        ("openai/gsm8k", "gsm8k", "dflash_acceptance_length"): 2.4,
        ("openai/gsm8k", "gsm8k", "speedup"): 1.9,
        ("openai/gsm8k", "gsm8k", "base_speedup"): 1.7,
        ("openai/gsm8k", "gsm8k", "dflash_speedup"): 1.8,
        ("own", "own", "acceptance_length"): 1.5,
    }
    assert all(result.metric_args == how for result in card.data.eval_results)
    table = tables(card)[1]
    shown = ", ".join(f"{name} {value}" for name, value in how.items())
    assert table[2:] == [
        ["gsm8k", "2.91", "2.20", "2.40", "1.90", "1.70", "1.80", shown],
        ["own", "1.50", "", "", "", "", "", shown],
    ]
    # The same file for the DFlash drafter that was measured beside it.
    saved_drafter(tmp_path / "dflash", head="none")
    card = ModelCard.load(write_card(tmp_path / "dflash", target=TARGET, results=tmp_path / "result.json"))
    assert [row[:3] for row in tables(card)[1][2:]] == [["gsm8k", "2.40", "1.80"], ["unmeasured", "2.00", "1.50"]]


def test_a_result_that_says_nothing_of_this_drafter_is_refused(tmp_path):
    saved_drafter(tmp_path)
    file = tmp_path / "result.json"
    empty = {**bench_result(), "summary": bench_result()["summary"][3:5]}
    for content, reason in (
        ("[2]", "must be a result of `hf-domino bench`"),
        ("{", "is no readable JSON file"),
        (json.dumps(bench_result(block_size=16)), "measured another drafter: its domino has block_size 16, not 8"),
        (json.dumps(empty), "has no measurement of the method domino"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=f"result.json {reason}"):
            write_card(tmp_path, target=TARGET, results=file)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("results", [{"gsm8k": "high"}, {"gsm8k": {"length": 2.9}}, {"gsm8k": None}, {"gsm8k": [2, 3]}])
def test_only_numbers_are_measured(results):
    with pytest.raises(ValueError, match="measured on gsm8k must be numbers, acceptance_length or"):
        model_card(tiny_drafter(tiny_target()).config, target=TARGET, acceptance=results)


PUSH = """
import copy
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from huggingface_hub import ModelCard
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError
from hf_domino import DominoDrafter
from hf_domino.hub import push_folder

# A folder with its card.
card = Path("drafter/README.md").read_text()
push_folder("drafter", "someone/pushed")
assert ModelCard.load("someone/pushed").content == card
drafter = DominoDrafter.from_pretrained("someone/pushed")

# A card that is there stays, and a drafter by other hands needs a card just as well.
drafter.push_to_hub("someone/pushed", commit_message="again")
assert Path("hub/someone/pushed/README.md").read_text() == card
drafter.push_to_hub("someone/copy")
again = ModelCard.load("hub/someone/copy/README.md")
assert again.data.base_model == "someone/a-target" and '"someone/copy"' in again.text and not again.data.eval_results
drafter.push_to_hub("someone/copy", acceptance={"gsm8k": 3.1}, license="mit", tags="mine", revision="new")
again = ModelCard.load("hub/someone/copy/README.md")
assert again.data.eval_results[0].metric_value == 3.1 and again.data.license == "mit" and "mine" in again.data.tags

# A folder says the rest where the weights are those that lie there.
drafter = DominoDrafter.from_pretrained("drafter")
drafter.push_to_hub("someone/whole")
whole = ModelCard.load("hub/someone/whole/README.md")
assert whole.data.eval_results[0].metric_value == 2.9 and "| held out | 3 |" in whole.text, whole.content
assert '"someone/whole"' in whole.text and whole.data.license == "apache-2.0" and "0123abc" in whole.text
assert {file.name for file in Path("hub/someone/whole").iterdir()} >= {"config.json", "model.safetensors"}
assert not Path("hub/someone/whole/training_recipe.json").exists()
drafter.norm.weight.data += 1
drafter.push_to_hub("someone/other")
other = ModelCard.load("hub/someone/other/README.md")
assert other.data.base_model == "someone/a-target" and other.data.license == "apache-2.0", other.content
assert not other.data.eval_results and "held out" not in other.text

drafter.save_pretrained("saved", push_to_hub=True, repo_id="someone/saved", license="mit", max_shard_size="20KB")
saved = ModelCard.load("hub/someone/saved/README.md")
assert saved.data.license == "mit" and saved.data.base_model == "someone/a-target"
for folder in ("saved", "hub/someone/saved"):
    assert len(list(Path(folder).glob("*.safetensors"))) > 1

# A card edited by its author is the author's, here and there.
Path("drafter/README.md").write_text(card.replace("## Limits", "## Limits, mine"))
drafter = DominoDrafter.from_pretrained("drafter")
drafter.push_to_hub("someone/edited")
edited = Path("hub/someone/edited/README.md").read_text()
assert "## Limits, mine" in edited
for name in ("someone/edited", "edited"):  # the second is one's own
    drafter.push_to_hub(name)
    assert Path("hub/someone/edited/README.md").read_text() == edited
for repo in ("someone/edited", "edited", "someone/nowhere"):
    try:
        drafter.push_to_hub(repo, license="mit")
    except FileExistsError as error:
        assert "edited" in str(error)
    else:
        raise AssertionError
assert Path("hub/someone/edited/README.md").read_text() == edited and not Path("hub/someone/nowhere").exists()

# A drafter of which nothing is known, or nothing that a stranger can use.
fresh = DominoDrafter(copy.deepcopy(drafter.config))
fresh.config._name_or_path = ""
fresh.save_pretrained("local")
Path("local/training_recipe.json").write_text('{"options": {"target": "/a/folder/here"}}')
for unknown in (fresh, DominoDrafter.from_pretrained("local")):
    try:
        unknown.push_to_hub("someone/fresh")
    except ValueError as error:
        assert "push_to_hub('someone/fresh', target=...)" in str(error)
    else:
        raise AssertionError
assert not Path("hub/someone/fresh").exists()
fresh.push_to_hub("someone/fresh", target="someone/a-target", target_revision="abc")
fresh = ModelCard.load("hub/someone/fresh/README.md")
assert "Not measured yet." in fresh.text and 'revision="abc"' in fresh.text and "## Training" not in fresh.text

# The Trainer's push writes the same kind of card.
from hf_domino.training.trainer import DominoTrainer, DominoTrainingArguments
from tests.tiny import tiny_target

target = tiny_target()
target.config._name_or_path = "someone/a-target"
args = DominoTrainingArguments("run", use_cpu=True, hub_model_id="someone/trained")
trainer = DominoTrainer(drafter, target, args, [{"input_ids": list(range(20)), "loss_mask": [0] * 5 + [1] * 15}])
trainer.push_to_hub(license="mit")
trained = ModelCard.load("hub/someone/trained/README.md")
assert trained.data.base_model == "someone/a-target" and trained.data.license == "mit", trained.content
assert '"someone/trained"' in trained.text, trained.content

# The Hub's errors are huggingface_hub's own.
for push in (lambda name: push_folder("drafter", name), drafter.push_to_hub):
    for name, kind, status in (
        ("stranger/pushed", HfHubHTTPError, 403),
        ("private/pushed", HfHubHTTPError, 403),
        ("no/such/name", HFValidationError, None),
    ):
        try:
            push(name)
        except (HfHubHTTPError, HFValidationError) as error:
            assert isinstance(error, kind) and (status is None or error.response.status_code == status), error
        else:
            raise AssertionError
try:
    drafter.push_to_hub("gated/pushed")
except GatedRepoError:
    pass
else:
    raise AssertionError
"""


def test_the_card_travels_to_the_hub(tmp_path):
    drafter = saved_drafter(tmp_path / "drafter")
    # What a training run leaves stays here.
    saved_drafter(tmp_path / "drafter" / "checkpoint-2")
    (tmp_path / "drafter" / "training_recipe.json").write_text(json.dumps(RECIPE))
    write_card(tmp_path / "drafter", target=TARGET, name="someone/pushed", acceptance={"gsm8k": 2.9})
    (tmp_path / "hub" / "someone").mkdir(parents=True)
    done = run_beside_a_hub(PUSH, tmp_path, Path(hf_domino.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    pushed = {str(file.relative_to(tmp_path / "hub/someone/pushed")) for file in (tmp_path / "hub").rglob("pushed/*")}
    code = {file.name for file in (tmp_path / "drafter").glob("*.py")}
    assert "hub.py" not in code and "modeling_domino.py" in code
    assert pushed == {"README.md", "config.json", "model.safetensors"} | code
    ours = AutoModel.from_pretrained(tmp_path / "hub/someone/pushed").state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in drafter.state_dict().items())
