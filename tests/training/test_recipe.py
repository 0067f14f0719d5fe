"""The recipe that stays with a drafter."""

from hf_domino.training.recipe import make_recipe, recipe_rows, write_recipe
from hf_domino.training.trainer import DominoTrainingArguments


def test_what_a_drafter_was_trained_on_before_is_told(tmp_path):
    args = DominoTrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=7, report_to="none")
    options = {"target": "t", "init_from": None, "from_target": True}
    first = make_recipe(options, args, 30, 4)
    assert first["before"] == {} and not any(name.startswith("before") for name in recipe_rows(first))
    write_recipe(tmp_path, first)
    options = {"target": "t", "init_from": str(tmp_path), "from_target": False}
    args.max_steps = 9
    rows = recipe_rows(make_recipe(options, args, 60, 4))
    assert rows["max_steps"] == 9 and rows["before: max_steps"] == 7
    assert rows["conversations"] == 60 and rows["before: conversations"] == 30
    assert rows["init_from"] == str(tmp_path) and rows["before: from_target"] is True
