"""The words that people type for models, devices and dtypes, and what they mean here."""

from __future__ import annotations

import pytest
from tilebudget.autotune import words
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.words import device_word, dtype_word
from tilebudget.kernels.latency.silicon import SystemInfo


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h100", "h100_sxm"),
        ("H100-SXM", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("H100 PCIe", "h100_pcie"),
        ("A100-SXM4-80GB", "a100_sxm"),
        ("a100-80gb", "a100_sxm"),
        ("A100", "a100_sxm"),
        ("H200", "h200_sxm"),
        ("B200", "b200_sxm"),
        ("GB200", "gb200"),
        ("L40S", "l40s"),
        ("RTX PRO 6000", "rtx_pro_6000_server"),
        ("a100-40gb", "a100-40gb"),  # the tables have the one of 80 GB
        ("CUDA", "cuda"),
        ("cuda:0", "cuda"),
        ("Auto", "auto"),
        ("My Profile.json", "My Profile.json"),
        ("tpu", "tpu"),
    ],
)
def test_a_device_is_found_in_the_words_of_its_makers(typed: str, meant: str) -> None:
    assert device_word(typed) == meant
    assert TuneConfig(device=typed).device == meant


def test_another_cuda_device_is_refused_with_the_way_to_choose_it() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:1': must be cuda, .*; CUDA_VISIBLE_DEVICES=1"):
        device_word("cuda:1")


def test_a_word_that_fits_several_measured_systems_is_refused_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [SystemInfo(system=name, frameworks={"vllm": {"1": ("bf16",)}}) for name in ("h100_pcie", "h100_sxm")]
    monkeypatch.setattr(words, "list_systems", lambda: both)
    with pytest.raises(ValueError, match="device='H100': must be one of h100_pcie, h100_sxm"):
        device_word("H100")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("float32", "fp32"),
        ("torch.bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("fp8_e4m3", "fp8"),
        ("AUTO", "auto"),
    ],
)
def test_a_dtype_is_found_in_the_words_of_torch_and_the_servers(typed: str, meant: str) -> None:
    assert dtype_word(typed) == TuneConfig(dtype=typed).dtype == meant


@pytest.mark.parametrize(
    ("settings", "model", "launched"),
    [
        ({"model": "llama-3.1-8b"}, "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ({"model": "meta-llama/llama-3.1-8b"}, "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ({"model": "meta-llama/Llama-2-7b-chat-hf"}, "llama-2-7b", "meta-llama/Llama-2-7b-chat-hf"),
        ({"model": "Qwen3-8B"}, "qwen3-8b", "Qwen/Qwen3-8B"),
        ({"model": "qwen/qwen3-8b", "model_name": "./mine"}, "qwen3-8b", "./mine"),
        ({"model": "llama-3.1-8b", "model_name": "my/llama"}, "llama-3.1-8b", "my/llama"),
        ({}, "tiny-llama", "tiny-llama"),
        # A hub id of another shape is no preset's.
        ({"model": "mistralai/Mistral-7B-v0.1"}, "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1"),
    ],
    ids=str,
)
def test_a_hub_id_finds_its_preset_and_names_the_launch_line(
    settings: dict[str, str], model: str, launched: str
) -> None:
    config = TuneConfig(**settings)  # type: ignore[arg-type]
    assert (config.model, config.launch_model) == (model, launched)
    assert TuneConfig.from_json(config.to_json()) == config


def test_a_study_is_the_same_whichever_of_its_names_the_model_has() -> None:
    """Of our engine, which runs the shape; a server runs the checkpoint."""
    names = ("llama-3.1-8b", "meta-llama/Llama-3.1-8B")
    ours = [TuneConfig(model=name, device="H200").identity() for name in names]
    assert ours[0] == ours[1]
    served = [TuneConfig(model=name, server="vllm").identity()["model"] for name in names]
    assert served == ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"]
