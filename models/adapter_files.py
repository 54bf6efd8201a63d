"""Adapters in files, as Hugging Face's PEFT has them: a folder with `adapter_config.json` and `adapter_model.safetensors`."""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import equinox as eqx
import jax

from . import checkpoints
from ._errors import ModelFileError
from ._replacing import replace_files
from ._safetensors import open_tensors
from .gguf import Config
from .lora import TARGETS, Adapters, init


NAMES = {
    f"base_model.model.model.layers.*.{module}.{target}.lora_{matrix.upper()}.weight": (
        f"blocks.*.{projection}.updates.{target}.{matrix}"
    )
    for projection, (module, targets) in {
        "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
        "attention_out": ("self_attn", ("o_proj",)),
        "gate_up": ("mlp", ("gate_proj", "up_proj")),
        "down": ("mlp", ("down_proj",)),
    }.items()
    for target in targets
    for matrix in "ab"
}
"""PEFT's names, and the paths in a `models.lora.Adapters`, for `models.checkpoints`."""

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT's configuration says beside the numbers that we read, and does not change what an adapter computes. Anything else in
# it has to be off.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_alpha", "lora_dropout"),
    *("megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("runtime_config", "target_modules", "task_type", "use_rslora"),
}
_OFF = (None, False, "none", [], {})


class _Settings(NamedTuple):
    rank: int
    scale: float
    targets: list[str]


def save(folder: str | os.PathLike[str], adapters: Adapters, *, alpha: float) -> None:
    """Write adapters into a folder, which is made if there is none.

    Adapters that it has are replaced once the new ones are on the disk. If just that is interrupted, the folder has no
    configuration, and `load` refuses it.

    **Arguments:**

    - `alpha`: their scale times their rank, which the file has in place of the scale. Of rank-stabilised LoRA, whose folder
        says `use_rslora`, it is their scale times the root of their rank.

    **Raises:**

    - `ValueError` if it is neither.
    - `OSError` if a file cannot be written.
    """
    folder = pathlib.Path(folder)
    updates = {
        name: update for of_projection in adapters.blocks[0].values() for name, update in of_projection.updates.items()
    }
    (rank,) = {update.a.shape[0] for update in updates.values()}
    scales = {adapter.scale for of_block in adapters.blocks for adapter in of_block.values()}
    is_plain, is_rslora = (
        all(math.isclose(scale * divisor, alpha, rel_tol=1e-6) for scale in scales)
        for divisor in (rank, math.sqrt(rank))
    )
    if not (is_plain or is_rslora):
        got = " and ".join(map(str, sorted(scales)))
        raise ValueError(
            f"adapter_files.save: expected alpha to be the adapters' scale, {got}, times their rank, {rank}; got {alpha}. "
            "Pass their product."
        )
    folder.mkdir(exist_ok=True)
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(updates),
        "task_type": "CAUSAL_LM",
    }
    if not is_plain:
        config["use_rslora"] = True
    text = json.dumps(config, indent=2) + "\n"
    replace_files(
        {
            folder / _TENSORS: lambda partial: checkpoints.save_safetensors(partial, adapters, NAMES),
            folder / _CONFIG: lambda partial: partial.write_text(text),
        }
    )


def check(folder: str | os.PathLike[str]) -> None:
    """Raise `ModelFileError` if a folder has no adapters that `load` reads, of whatever model. JAX does not start."""
    folder = pathlib.Path(folder)
    _read(folder / _CONFIG)
    open_tensors(folder / _TENSORS)


def load(folder: str | os.PathLike[str], config: Config) -> Adapters:
    """Read the adapters of a folder, of `save` or of PEFT.

    **Arguments:**

    - `config`: of the model that they are for.

    **Raises:** `ModelFileError` if they are not plain LoRA of this model's linear layers, in f32.
    """
    folder = pathlib.Path(folder)
    settings = _read(folder / _CONFIG)
    like = eqx.filter_eval_shape(init, config, **settings._asdict(), key=jax.random.key(0))
    return checkpoints.load(folder / _TENSORS, like, NAMES)


def _read(path: pathlib.Path) -> _Settings:
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(
            f"{path}: expected the configuration of an adapter; got: {reason}. Pass its folder."
        ) from None

    def require(holds: bool, expected: str, name: str) -> None:
        if not holds:
            raise ModelFileError(
                f"{path}: expected {name} to be {expected}; got {config.get(name)!r}, which is not supported. Use plain LoRA."
            )

    if not isinstance(config, dict):
        raise ModelFileError(f"{path}: expected a JSON object; got {type(config).__name__}. Pass an adapter's folder.")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    targets: Any = config.get("target_modules")
    require(config.get("peft_type") == "LORA", "'LORA'", "peft_type")
    require(type(rank) is int and rank >= 1, "a positive integer", "r")
    require(type(alpha) in (int, float) and math.isfinite(alpha), "a number", "lora_alpha")
    fits = isinstance(targets, list) and len(targets) > 0 and all(target in TARGETS for target in targets)
    require(fits, f"a list of {', '.join(TARGETS)}", "target_modules")
    require(config.get("bias", "none") == "none", "'none'", "bias")
    # Others, such as PiSSA, change the model's own weights.
    require(
        config.get("init_lora_weights", True) in (True, False, "gaussian"),
        "true, false or 'gaussian'",
        "init_lora_weights",
    )
    for name in config.keys() - _HARMLESS:
        require(config[name] in _OFF, "off", name)
    return _Settings(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), targets)
