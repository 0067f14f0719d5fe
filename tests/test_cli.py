"""hf-domino regenerate, train and card, from the prompts to a drafter that generate() takes."""

import json
from collections import Counter

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForCausalLM

from hf_domino import DominoConfig, DominoDrafter, Eagle3Config, Eagle3Drafter
from hf_domino.cli import hold_out, main
from hf_domino.training.trainer import DominoTrainer

from .tiny import assert_same_as_plain, inputs, tiny_target
from .training.test_data import END, tiny_tokenizer

SMALL = dict(
    block_size=4,
    num_hidden_layers=1,
    causal_state_size=8,
    correction_rank=4,
    num_anchors=4,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="steps",
    save_steps=2,
    logging_steps=1,
    eval_size=2,
    log_level="error",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, prompts and the conversations that the first command made of them."""
    folder = tmp_path_factory.mktemp("cli")
    target = tiny_target()
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = 0
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    lines = [json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    command = ["regenerate", "--target", folder / "target", "--prompts", folder / "prompts.jsonl"]
    main([*map(str, command), "--out", str(folder / "data"), "--max-new-tokens", "16", "--device", "cpu"])
    return folder


def train(folders, out, *arguments, **settings):
    config = out.parent / f"{out.name}.yaml"
    config.write_text(yaml.safe_dump({**SMALL, **settings}))
    where = ["--target", folders / "target", "--data", folders / "data", "--out", out, "--config", config]
    main(["train", *map(str, where), *arguments])


def test_a_draft_vocabulary_from_token_counts(folders, tmp_path):
    """The tokens that the answers use most, with the end of the turn; training itself sees every token."""
    out = tmp_path / "drafter"
    train(folders, out, draft_vocabulary_size=6, num_correction_candidates=3)
    drafter = DominoDrafter.from_pretrained(out)
    records = [json.loads(line) for line in (folders / "data" / "conversations.jsonl").read_text().splitlines()]
    uses = Counter(token for r in records for token, own in zip(r["input_ids"], r["loss_mask"]) if own)
    drafted = drafter.draft_vocabulary.tolist()
    assert len(drafted) == 6 and drafter.config.num_correction_candidates == 3
    assert sum(uses[token] for token in drafted) > 0.8 * sum(count for _, count in uses.most_common(6))


def test_from_prompts_to_generation(folders, tmp_path, capsys):
    out = tmp_path / "drafter"
    train(folders, out, "--eval-size", "3", "--cache-features", str(tmp_path / "cache"), soft_target_weight=0.5)
    assert "take" in capsys.readouterr().out  # the space of the cache
    drafter = AutoModel.from_pretrained(out)
    assert type(drafter) is DominoDrafter and drafter.dtype == torch.bfloat16 and drafter.config.block_size == 4
    state = json.loads((out / "trainer_state.json").read_text())
    assert {"base_loss", "final_loss", "lambda"} <= set(state["log_history"][0])
    assert "eval_base_acceptance_length" in state["log_history"][-1]
    recipe = json.loads((out / "training_recipe.json").read_text())
    assert recipe["data"] == {"conversations": 12, "held_out": 3, "without_anchor": 0}
    assert recipe["arguments"]["soft_target_weight"] == 0.5
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    assert_same_as_plain(target, drafter.float(), **inputs())
    # The card: the last walk, base and final apart.
    card = ModelCard.load(out / "README.md")
    lengths = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = state["log_history"][-1]
    names = ("acceptance_length", "base_acceptance_length")
    assert lengths == {name: pytest.approx(last[f"eval_{name}"], abs=1e-3) for name in names}
    assert "| conversations | 12 |" in card.text and "| soft_target_weight | 0.5 |" in card.text
    assert "| answers: max_new_tokens | 16 |" in card.text and f'"{folders / "target"}"' in card.text


def test_an_eagle3_drafter_from_prompts_to_generation(folders, tmp_path):
    out, config = tmp_path / "drafter", tmp_path / "recipe.yaml"
    own = {name: value for name, value in SMALL.items() if name in Eagle3Config.own_fields() or "_steps" in name}
    own |= {name: SMALL[name] for name in SMALL.keys() - DominoConfig.own_fields()}
    config.write_text(yaml.safe_dump({**own, "method": "eagle3", "soft_target_weight": 1.0, "max_steps": 3}))
    where = ["--target", folders / "target", "--data", folders / "data", "--out", out, "--config", config]
    command = ["train", *map(str, where), "--draft_vocabulary_size", "12", "--num_draft_tokens", "3"]
    main([*command, "--cache-features", str(tmp_path / "cache")])
    drafter = AutoModel.from_pretrained(out)
    assert type(drafter) is Eagle3Drafter and len(drafter.draft_vocabulary) == 12
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    assert max(assert_same_as_plain(target, drafter.float(), 1.0, **inputs()).drafted) == 3
    card = ModelCard.load(out / "README.md")
    assert "eagle3" in card.data.tags and "| method | eagle3 |" in card.text
    again = AutoModel.from_pretrained(out, dtype=torch.float32)
    main([*command[:-4], "--num_draft_tokens", "2", "--init_from", str(out), "--out", str(tmp_path / "second")])
    second = AutoModel.from_pretrained(tmp_path / "second")
    assert torch.equal(second.draft_vocabulary, again.draft_vocabulary) and second.config.num_draft_tokens == 2
    assert not torch.equal(second.fc.weight, again.fc.weight.to(second.dtype))
    with pytest.raises(SystemExit, match="--block_size can't be given with --method eagle3"):
        main([*command, "--block_size", "4", "--out", str(tmp_path / "third")])
    with pytest.raises(SystemExit, match="must be one of domino, eagle3"):
        main([*command, "--method", "eagle", "--out", str(tmp_path / "third")])


def test_a_card_is_refreshed(folders, tmp_path, capsys):
    out = tmp_path / "drafter"
    train(folders, out, "--license", "mit", max_steps=1)
    assert ModelCard.load(out / "README.md").data.license == "mit"
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"acceptance": {"gsm8k": 2.5}, "speed": {"gsm8k": 1.5}}))
    refresh = ["card", "--drafter", str(out), "--target", "someone/target", "--name", "someone/drafter"]
    main([*refresh, "--license", "apache-2.0", "--results", str(results)])
    assert f"The card is {out / 'README.md'}" in capsys.readouterr().out
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "apache-2.0" and card.data.base_model == "someone/target"
    assert card.data.model_name == "someone/drafter" and "| gsm8k | 2.50 |  | 1.50 |" in card.text
    assert "| 1 | " in card.text  # the curve is still there

    edited = (out / "README.md").read_text().replace("## Limits", "## Limits and more")
    (out / "README.md").write_text(edited)
    with pytest.raises(SystemExit, match="was edited since"):
        main(refresh)
    train(folders, out, "--license", "mit", max_steps=1)  # leaves it too, and says so in the log
    assert (out / "README.md").read_text() == edited
    main([*refresh, "--overwrite"])
    assert "Limits and more" not in (out / "README.md").read_text()
    for bad in ("[]", '{"gsm8k": 2.5}', "{"):
        results.write_text(bad)
        with pytest.raises(SystemExit, match="hf-domino: "):
            main([*refresh, "--results", str(results)])


def test_a_run_goes_on_with_its_own_recipe_only(folders, tmp_path):
    out = tmp_path / "drafter"
    train(folders, out, max_steps=2)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    changed = dict(learning_rate=0.1, lambda_share=0.5, num_hidden_layers=2, per_device_train_batch_size=2)
    with pytest.raises(SystemExit) as refused:
        train(folders, out, max_steps=3, **changed)
    message = str(refused.value)
    assert "was started with another recipe" in message and "\n" not in message
    for said in (
        "learning_rate was 0.0006, now 0.1",
        "lambda_share was 1.0, now 0.5",
        "num_hidden_layers was 1, now 2",
        "max_steps was 2, now 3",
        "* processes was 4, now 2",
    ):
        assert said in message
    assert message.count(" was ") == 6  # "was started" too
    with pytest.raises(SystemExit, match="held_out was 2, now 3"):
        train(folders, out, max_steps=2, eval_size=3)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    # The same steps in other batches, and what only says where, how often and how fast.
    same = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    train(folders, out, max_steps=2, logging_steps=5, save_dtype="float32", **same)
    assert AutoModel.from_pretrained(out).dtype == torch.float32
    # A folder without a checkpoint holds no run to go on with.
    fresh = tmp_path / "fresh"
    train(folders, fresh, max_steps=1, save_strategy="no")
    train(folders, fresh, max_steps=1, save_strategy="no", learning_rate=0.1)
    assert json.loads((fresh / "training_recipe.json").read_text())["arguments"]["learning_rate"] == 0.1


def test_the_command_line_wins_over_the_file(folders, tmp_path):
    out = tmp_path / "drafter"
    train(folders, out, "--head", "none", "--block_size=8", "--from-target", "--save_dtype", "float32", max_steps=1)
    drafter = AutoModel.from_pretrained(out)
    assert drafter.config.head == "none" and drafter.config.block_size == 8 and drafter.dtype == torch.float32
    assert drafter.config.target_layer_ids == [2]  # the layer under the copied one

    # A DFlash drafter becomes a Domino one, in its own block size.
    warm = tmp_path / "warm"
    train(folders, warm, "--init-from", str(out), "--head", "domino", max_steps=1, block_size=None)
    assert AutoModel.from_pretrained(warm).config.block_size == 8
    assert AutoModel.from_pretrained(warm).config.head == "domino"


def test_a_killed_run_goes_on(folders, tmp_path, monkeypatch):
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    step = DominoTrainer.training_step

    def killed_at_the_fourth(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DominoTrainer, "training_step", killed_at_the_fourth)
        train(folders, killed)
    (killed / "checkpoint-4").mkdir()  # as if it had been killed while it saved
    for out in (killed, straight):
        train(folders, out)
    ours, other = (AutoModel.from_pretrained(out).state_dict() for out in (killed, straight))
    assert all(torch.equal(ours[name], other[name]) for name in other)


def test_held_out_prompts_keep_their_samples_together():
    records = [{"key": f"k{i}", "sample": j} for i in range(10) for j in range(3)]
    train_records, held = hold_out(records, 4)
    assert len(held) == 6 and not {r["key"] for r in held} & {r["key"] for r in train_records}
    more = records + [{"key": "z", "sample": 0}]
    assert [r for r in hold_out(more, 4)[1] if r["key"] != "z"][:3] == held[:3]
    with pytest.raises(ValueError, match="leaves none to train on"):
        hold_out(records, 30)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--init_from", "x", "--from_target"], "give one"),
        (["--data", "nowhere"], "nowhere holds no conversations"),
        (["--no_such_option", "1"], "no_such_option"),
        (["--num_hidden_layers", "9", "--from_target"], "num_hidden_layers is 9, but the target has 4"),
        (["--target_layer_ids", "1", "7"], "target_layer_ids"),
        (["--eval_size", "12"], "leaves none to train on"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_is_one_clear_line(folders, tmp_path, arguments, match):
    with pytest.raises(SystemExit, match=match):
        train(folders, tmp_path / "drafter", *arguments)
    assert not (tmp_path / "drafter").exists()


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "regenerate,train" in capsys.readouterr().err
