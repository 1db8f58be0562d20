"""Presets against published sizes; config.json in both styles; what is refused, and how it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tilebudget.engine.model.config import PRESETS, ModelConfig, RopeConfig
from tilebudget.engine.model.hf_config import from_hf, resolve_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_config(folder: Path, **changes: object) -> Path:
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# Parameter counts in billions as the model cards and papers give them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("mistral-7b", 7.25),
        ("yi-34b", 34.39),
        ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19),
        ("falcon-180b", 179.5),
    ],
)
def test_preset_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert ModelConfig.preset(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_preset_is_named_after_its_key() -> None:
    assert [config.name for config in PRESETS.values()] == list(PRESETS)
    assert len(PRESETS) == 10


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"model='gpt-5'.*tiny-llama.*falcon-180b"):
        ModelConfig.preset("gpt-5")


def test_older_and_newer_rope_styles_read_alike(tmp_path: Path) -> None:
    older, newer = tmp_path / "m", tmp_path / "n" / "m"
    older.mkdir()
    newer.mkdir(parents=True)
    write_config(older, rope_theta=500000.0, rope_scaling=LLAMA_3_1_ROPE)
    write_config(newer, rope_parameters={"rope_theta": 500000.0, **LLAMA_3_1_ROPE})

    assert from_hf(older) == from_hf(newer)
    assert from_hf(older).rope == RopeConfig(
        theta=500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_older_linear_scaling_with_the_key_named_type(tmp_path: Path) -> None:
    config = from_hf(write_config(tmp_path, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}))
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("linear", 4.0, 10000.0)


def test_defaults_where_config_json_leaves_fields_out(tmp_path: Path) -> None:
    config = from_hf(write_config(tmp_path, num_key_value_heads=..., architectures=...))
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 16, RopeConfig())
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("Mistral", {"sliding_window": None}, (False, False, False, False)),
        ("Qwen2", {}, (True, False, False, False)),
        ("Qwen3", {}, (False, False, False, True)),
        ("Qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_switches_of_each_family(
    family: str, changes: dict[str, object], expected: tuple[bool, ...], tmp_path: Path
) -> None:
    config = from_hf(
        write_config(tmp_path, architectures=[f"{family}ForCausalLM"], model_type=family.lower(), **changes)
    )
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("family", "changes", "max_position"),
    [
        ("Mistral", {"sliding_window": 256}, 256),
        ("Mistral", {"sliding_window": None}, 1024),
        ("Qwen2", {"sliding_window": 256, "use_sliding_window": False}, 1024),
        ("Qwen2", {"sliding_window": 256, "use_sliding_window": True}, 256),
    ],
)
def test_sliding_window_caps_the_context(
    family: str, changes: dict[str, object], max_position: int, tmp_path: Path
) -> None:
    config = from_hf(write_config(tmp_path, architectures=[f"{family}ForCausalLM"], **changes))
    assert config.max_position == max_position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures=\['GPT2LMHeadModel'\]: must be one of LlamaForCausalLM",
        ),
        ({"architectures": ..., "model_type": "mamba"}, r"model_type='mamba': must be one of llama"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': must be 'silu'"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is set: must be absent"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling.rope_type='yarn': must be one of default"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            r"rope_parameters=.*: must be one flat JSON object",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"factor=None: must be a number"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5: must be 1.0"),
        ({"hidden_size": ...}, r"hidden_size=None: must be a whole number"),
        ({"hidden_size": "64"}, r"hidden_size='64': must be a whole number"),
        ({"num_hidden_layers": 0}, r"num_layers=0: must be at least 1"),
        ({"num_key_value_heads": 3}, r"num_heads=4: must be a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, r"head_dim=15: must be even"),
        ({"rope_theta": -1.0}, r"theta=-1.0: must be above 0"),
    ],
)
def test_refusal_names_file_field_value_and_rule(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        from_hf(write_config(tmp_path, **changes))


def test_folder_without_config_and_damaged_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        from_hf(tmp_path)


def test_resolve_model_takes_a_preset_or_a_folder(tmp_path: Path) -> None:
    assert resolve_model("tiny-llama") == (PRESETS["tiny-llama"], None)
    config, folder = resolve_model(str(write_config(tmp_path)))
    assert (config.hidden_size, folder) == (64, tmp_path)
    with pytest.raises(ValueError, match=r"must be a folder with a config\.json, or one of"):
        resolve_model("no/such/folder")


@pytest.mark.parametrize(
    ("typed", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/LLAMA-3.1-8B", "llama-3.1-8b"),
        ("qwen/qwen3-8b", "qwen3-8b"),
        ("Llama-2-70B", "llama-2-70b"),
    ],
)
def test_a_hub_id_finds_its_preset_in_any_case(typed: str, preset: str) -> None:
    assert resolve_model(typed) == (ModelConfig.preset(preset), None)


def test_a_hub_id_of_no_preset_is_refused() -> None:
    """v0.1 has a sliding window, which the preset has not."""
    with pytest.raises(ValueError, match=r"model='mistralai/Mistral-7B-v0.1': must be a folder"):
        resolve_model("mistralai/Mistral-7B-v0.1")
