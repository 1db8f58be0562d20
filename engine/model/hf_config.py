"""Reads the ``config.json`` of a Hugging Face folder into a ``ModelConfig``, or says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .config import PRESETS, ROPE_TYPES, ModelConfig, RopeConfig, hub_id

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def from_hf(folder: str | Path) -> ModelConfig:
    """The model in a Hugging Face folder, from its ``config.json``.

    Reads the older style (``rope_theta``, ``rope_scaling``) and the newer (``rope_parameters``). Raises ValueError
    that names the file, the field, its value and the rule for anything that this engine does not compute.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model={str(folder)!r}: no config.json in that folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(raw).__name__}")
    try:
        return _parse_hf(raw, Path(folder).resolve().name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def resolve_model(model: str | Path) -> tuple[ModelConfig, Path | None]:
    """The config for ``model``, a preset's name or hub id, or a folder; and the folder, None for a preset."""
    if isinstance(model, str) and model in PRESETS:
        return PRESETS[model], None
    if Path(model).is_dir():
        return from_hf(model), Path(model)
    return ModelConfig.preset(str(model)), None


def launch_name(model: str | Path) -> str:
    """What a server loads ``model`` by: a preset's hub id, a folder's path, anything else as it is."""
    given = str(model)
    return given if given not in PRESETS and Path(given).is_dir() else hub_id(given) or given


def _parse_hf(raw: Mapping[str, object], name: str) -> ModelConfig:
    family = _family(raw)
    _refuse_unsupported(raw)
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    max_position = _integer(raw, "max_position_embeddings")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        name=name,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
        head_dim=_integer(raw, "head_dim", hidden_size // max(num_heads, 1)),
        intermediate_size=_integer(raw, "intermediate_size"),
        max_position=min(max_position, _sliding_window(raw, family) or max_position),
        rope=_rope(raw, max_position),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family != "mistral" and attention_bias),
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def _family(raw: Mapping[str, object]) -> str:
    listed = raw.get("architectures")
    if isinstance(listed, list) and listed:
        if listed[0] not in ARCHITECTURES:
            raise ValueError(f"architectures={listed}: must be one of {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[listed[0]]
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES.values():
        raise ValueError(f"model_type={model_type!r}: must be one of {', '.join(ARCHITECTURES.values())}")
    return str(model_type)


def _refuse_unsupported(raw: Mapping[str, object]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r}: must be 'silu'")
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set: must be absent, quantised weights are not read")
    partial = raw.get("partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial}: must be 1.0")


def _sliding_window(raw: Mapping[str, object], family: str) -> int | None:
    """Tokens of the window that some layer uses, None where all see everything."""
    if raw.get("sliding_window") is None or (family != "mistral" and not raw.get("use_sliding_window", False)):
        return None
    return _integer(raw, "sliding_window")


def _rope(raw: Mapping[str, object], max_position: int) -> RopeConfig:
    parameters = raw.get("rope_parameters")
    newer = parameters is not None
    if not newer:
        parameters = raw.get("rope_scaling") or {}
    field = "rope_parameters" if newer else "rope_scaling"
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(f"{field}={parameters}: must be one flat JSON object, the same for every layer")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{field}.rope_type={rope_type!r}: must be one of {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{field}.partial_rotary_factor={parameters['partial_rotary_factor']}: must be 1.0")
    rope = RopeConfig(theta=_number({"rope_theta": theta}, "rope_theta", 10000.0), rope_type=str(rope_type))
    if rope_type == "default":
        return rope
    rope = replace(rope, factor=_number(parameters, "factor"))
    if rope_type == "linear":
        return rope
    return replace(
        rope,
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position=_integer(parameters, "original_max_position_embeddings", max_position),
    )


def _integer(raw: Mapping[str, object], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field}={value!r}: must be a whole number")
    return value


def _number(raw: Mapping[str, object], field: str, default: float | None = None) -> float:
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}={value!r}: must be a number")
    return float(value)
