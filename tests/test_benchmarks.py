"""The benchmark scripts run, at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from .tiny import tiny_drafter, tiny_target

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
        command += ["--block-sizes", "4", "--oracle-rate", "1.0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr
    results = json.loads((tmp_path / "r").read_text())["results"]
    assert len(results) == 2 and "plain:" in out.stdout and "assisted:" in out.stdout
    for result in results.values():
        assert result["prompts_with_the_same_tokens"] == 2
        assert result["acceptance_length"] >= (1 if with_drafter else 4)
        assert all(value > 0 for name, value in result["ms"].items() if name != "rest")
