import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from hf_domino import DominoDrafter, track_acceptance
from hf_domino.training.features import Conversations, cache_features
from hf_domino.training.trainer import DominoTrainer, DominoTrainingArguments, last_checkpoint, most_frequent_tokens
from tests.training.toy import frozen, toy_drafter, toy_records, toy_target, toy_text

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    return toy_target()


def arguments(folder, **fields):
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        learning_rate=0.01,
        per_device_train_batch_size=22,
        num_anchors=4,
        max_steps=10,
        log_level="error",
    )
    return DominoTrainingArguments(**{**defaults, **fields})


def trainer_for(model, folder, drafter=None, records=None, **fields):
    kwargs = {name: fields.pop(name) for name in ("eval_dataset", "feature_cache") if name in fields}
    return DominoTrainer(
        drafter or toy_drafter(model), model, arguments(folder, **fields), records or toy_records(), **kwargs
    )


def history(trainer, *names):
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]


def generated_lengths(model, drafter, length=24):
    """Acceptance lengths of generate() on the toy language, without the last round, which has no room."""
    ids = torch.tensor([toy_text(3, 2)])
    with track_acceptance() as acceptance:
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
    assert text[0].tolist() == toy_text(3, length + 2)
    return acceptance.lengths[:-1]


@pytest.mark.parametrize("fields", [{}, {"sample_from_anchor": False}, {"head": "none"}])
def test_toy_language_reaches_the_block_limit(model, tmp_path, fields):
    """Trained by the trainer, decoded by generate(): both read the block alignment alike."""
    drafter = toy_drafter(model, **fields)
    trainer = trainer_for(
        model,
        tmp_path,
        drafter,
        max_steps=200,
        logging_steps=50,
        per_device_train_batch_size=44,
        eval_dataset=toy_records(6),
    )
    trainer.train()
    metrics = trainer.evaluate()
    limit = drafter.config.num_draft_tokens + 1
    assert limit == (4 if fields.get("sample_from_anchor") is False else 5)
    assert set(generated_lengths(model, drafter.eval())) == {limit}
    # The base was not left behind by the head.
    assert trainer.state.log_history[3]["base_accuracy"] > 0.9
    assert metrics["eval_base_acceptance_length"] > 0.8 * metrics["eval_acceptance_length"]


def test_without_the_curriculum_the_base_collapses_and_that_is_seen(model, tmp_path):
    """With lambda = 0 from the first step the head does the work that the base should have learned."""
    strong_head = dict(block_size=8, num_uncorrected_tokens=0, causal_state_size=64, correction_rank=24)
    sizes = dict(max_steps=60, logging_steps=10, per_device_train_batch_size=44, log_slots=True)
    logs = []
    for share in (0.0, 1.0):
        drafter = toy_drafter(model, **strong_head)
        trainer = trainer_for(model, tmp_path, drafter, eval_dataset=toy_records(22), lambda_share=share, **sizes)
        trainer.train()
        logs.append(trainer.state.log_history[5] | trainer.evaluate())
    collapsed, anchored = logs
    assert collapsed["lambda"] == 0 and anchored["lambda"] == pytest.approx(1 / 60)
    assert collapsed["accuracy"] > 0.95 and anchored["accuracy"] > 0.95
    assert collapsed["base_accuracy"] < 0.87 < 0.93 < anchored["base_accuracy"]
    share = [log["eval_base_acceptance_length"] / log["eval_acceptance_length"] for log in logs]
    assert share[0] < 0.72 < share[1]
    assert {"accuracy_1", "base_accuracy_8", "base_loss", "final_loss", "acceptance_at_anchors"} <= set(collapsed)


def test_defaults_are_the_published_recipe(tmp_path):
    args = DominoTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.weight_decay, args.lr_scheduler_type, args.warmup_steps) == (
        6e-4,
        0,
        "cosine",
        0.04,
    )
    assert (args.max_grad_norm, args.num_anchors, args.lambda_start, args.lambda_share) == (1.0, 256, 1.0, 1.0)
    assert args.optim.startswith("adamw_torch") and args.max_length == 3072


def test_resume_is_exact(model, tmp_path):
    """10 steps are 5, saved, loaded into a fresh drafter, and 5 more; an epoch ends on the way, in the middle of it."""
    names = ("loss", "base_loss", "final_loss", "lambda", "learning_rate", "acceptance_at_anchors", "epoch")
    fields = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, save_strategy="steps", save_steps=4)
    straight = trainer_for(model, tmp_path / "straight", **fields)
    straight.train()
    resumed = trainer_for(model, tmp_path / "resumed", **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-4"))
    assert len(history(resumed, *names)) == 10
    assert history(straight, *names)[:4] == history(resumed, *names)[:4]
    assert history(straight, *names)[4:] == history(resumed, *names)[4:]
    for own, other in zip(straight.drafter.parameters(), resumed.drafter.parameters()):
        assert torch.equal(own, other)
    state = resumed.optimizer.state_dict()["state"][0]
    assert state["exp_avg"].dtype == torch.float32 and state["step"] == 10


def test_gradient_accumulation_does_not_change_the_run(model, tmp_path):
    """Records of different lengths and supervision: 1 batch of 12, 2 of 6 or 12 of 1 a step."""
    records = [record | {"loss_mask": [0] * i + record["loss_mask"][i:]} for i, record in enumerate(toy_records(12))]
    losses = []
    for size, steps in ((12, 1), (6, 2), (1, 12)):
        trainer = trainer_for(
            model,
            tmp_path,
            records=records,
            max_steps=4,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        trainer.train()
        losses.append([x for row in history(trainer, "loss", "base_loss", "grad_norm", "accuracy") for x in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_cached_features_train_as_online_ones(model, tmp_path):
    cache = cache_features(
        frozen(model), toy_records(), [1], tmp_path / "cache", last_hidden=True, dtype=torch.float32, progress=False
    )
    runs = []
    for feature_cache in (None, cache):
        trainer = trainer_for(
            model,
            tmp_path,
            feature_cache=feature_cache,
            max_steps=4,
            soft_target_weight=0.5,
            loss_vocabulary_size=10,
            max_length=20,
        )
        trainer.train()
        runs.append([x for row in history(trainer, "loss", "total_variation", "outside_vocabulary") for x in row])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert 0.3 < runs[0][2] < 0.7
    with pytest.raises(ValueError, match=r"its layer_ids is \[1\], not \[2\]"):
        trainer_for(model, tmp_path, toy_drafter(model, target_layer_ids=[2]), feature_cache=cache)


def test_loss_vocabulary_holds_the_most_frequent_answer_tokens():
    records = [{"input_ids": [9, 9, 9, 1, 2, 2, 3, 3, 3], "loss_mask": [0, 0, 0] + [1] * 6}]
    assert most_frequent_tokens(Conversations(records), 2).tolist() == [3, 2]
    assert most_frequent_tokens(Conversations(records), None) is None


def test_the_saved_folder_is_a_drafter_and_best_is_kept(model, tmp_path):
    trainer = trainer_for(
        model,
        tmp_path,
        bf16=True,
        gradient_checkpointing=True,
        max_steps=30,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        load_best_model_at_end=True,
        eval_dataset={"toy": toy_records(4)},
        metric_for_best_model="eval_toy_acceptance_length",
    )
    trainer.train()
    trainer.save_model()
    assert {path.suffix for path in (tmp_path / "checkpoint-30").iterdir()} >= {".safetensors", ".py", ".pt"}
    saved = AutoModel.from_pretrained(tmp_path)
    assert type(saved) is DominoDrafter
    best = AutoModel.from_pretrained(trainer.state.best_model_checkpoint)
    for own, other in zip(saved.state_dict().values(), best.state_dict().values()):
        assert torch.equal(own, other)
    assert not any(p.requires_grad for p in model.parameters())
    assert all("use_cache" not in (tmp_path / name).read_text() for name in ("config.json",))
    generated_lengths(model, saved)


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, text in ((5, '{"global_step": 5}'), (10, '{"global_step": 10}'), (15, '{"glob'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_what_does_not_fit_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 50, the target's vocab_size is 24"):
        trainer_for(model, tmp_path, toy_drafter(model, vocab_size=50))
    with pytest.raises(ValueError, match="lambda_start"):
        trainer_for(model, tmp_path, lambda_start=2.0)
    with pytest.raises(ValueError, match="soft_target_weight"):
        trainer_for(model, tmp_path, soft_target_weight=2.0)
    with pytest.raises(ValueError, match="nothing to train on"):
        trainer_for(model, tmp_path, records=[{"input_ids": [1, 2], "loss_mask": [0, 1]}])


def distributed_results(folder, size):
    """Histories at lambda = 1 and 0, one sequence without an anchor among them, and the walk; the same in one process
    or several."""
    results = {}
    for name, fields in (("one", {"lambda_share": math.inf}), ("zero", {"lambda_share": 0.0})):
        model, data = toy_target(), Conversations(toy_records(8))
        ids, mask, digest = data.records[3]
        data.records[3] = (ids, torch.zeros_like(mask), digest)  # data sets leave it out; a resumed one may not
        trainer = trainer_for(
            model,
            folder,
            records=data,
            max_steps=5,
            per_device_train_batch_size=size,
            eval_dataset=toy_records(3),
            **fields,
        )
        trainer.train()
        numbers = history(trainer, "loss", "base_loss", "accuracy", "grad_norm", "lambda", "skipped_sequences")
        results[name] = numbers, trainer.evaluate()["eval_acceptance_length"]
    trainer.save_model()
    return results


def test_two_processes_train_as_one(tmp_path):
    """With gloo on the CPU, at lambda = 1 and 0, and no search for unused parameters."""
    script = """
import json, sys
from tests.training.test_trainer import distributed_results
results = json.dumps(distributed_results(sys.argv[1], size=1))
open(f"{sys.argv[1]}/results-{__import__('os').environ['RANK']}.json", "w").write(results)
"""
    (tmp_path / "run.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "run.py"), str(tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "results-0.json").read_text())
    one = distributed_results(tmp_path / "one", size=2)
    for name in ("one", "zero"):
        (rows, walked), (other_rows, other_walked) = one[name], two[name]
        assert [x for row in other_rows for x in row] == pytest.approx([x for row in rows for x in row], rel=1e-3), name
        assert walked == other_walked
        assert {row[-2] for row in rows} == {1.0 if name == "one" else 0.0}
        assert sum(row[-1] for row in rows) >= 1
    assert type(AutoModel.from_pretrained(tmp_path / "two")) is DominoDrafter
