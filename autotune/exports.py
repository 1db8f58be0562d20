"""A recommended budget in the words of each server. Meanings are converted, not only names.

vLLM's budget counts decodes; SGLang's ``chunked_prefill_size`` counts prefill tokens only, and with mixed chunks the
decodes come on top; TensorRT-LLM's documents suggest a multiple of ``tokens_per_block``; Sarathi-Serve's
``chunk_size`` counts all tokens of an iteration.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

Argument = str | int | bool

TRTLLM_TOKENS_PER_BLOCK = 64
VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a recommendation fixes, in our words; every export translates these."""

    token_budget: int
    max_num_seqs: int
    max_model_len: int
    dtype: str
    tensor_parallel: int
    pipeline_parallel: int


def vllm_args(settings: ServerSettings) -> dict[str, Argument]:
    """Engine arguments of vLLM; its budget counts decodes and must be at least ``max_num_seqs``, as ours."""
    return {
        "max_num_batched_tokens": settings.token_budget,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "enable_chunked_prefill": True,
        **_quantization(settings.dtype),
    }


def sglang_args(settings: ServerSettings, *, page_size: int = 1) -> dict[str, Argument]:
    """Server arguments of SGLang. A full set of decodes is taken off the budget, because with mixed chunks they come on
    top of the chunk; the rest is rounded down to a multiple of ``page_size`` (at least one page)."""
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: must be at least 1")
    chunk = max(page_size, (settings.token_budget - settings.max_num_seqs) // page_size * page_size)
    return {
        "chunked_prefill_size": chunk,
        "enable_mixed_chunk": True,
        "page_size": page_size,
        "max_running_requests": settings.max_num_seqs,
        "context_length": settings.max_model_len,
        "dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "tp_size": settings.tensor_parallel,
        "pp_size": settings.pipeline_parallel,
        **_quantization(settings.dtype),
    }


def _quantization(dtype: str) -> dict[str, Argument]:
    """vLLM and SGLang take fp8 as a quantization of the weights, not as a dtype."""
    return {"quantization": "fp8"} if dtype == "fp8" else {}


def trtllm_args(settings: ServerSettings) -> dict[str, Argument]:
    """Options of ``trtllm-serve``; the budget is rounded down to a multiple of 64 (tokens_per_block) where it has one.

    The dtype is the checkpoint's. A budget that rounding would bring below ``max_num_seqs`` stays as it is.
    """
    rounded = settings.token_budget // TRTLLM_TOKENS_PER_BLOCK * TRTLLM_TOKENS_PER_BLOCK
    return {
        "max_num_tokens": rounded if rounded >= settings.max_num_seqs else settings.token_budget,
        "max_batch_size": settings.max_num_seqs,
        "max_seq_len": settings.max_model_len,
        "tp_size": settings.tensor_parallel,
        "pp_size": settings.pipeline_parallel,
        "enable_chunked_prefill": True,
    }


def sarathi_args(settings: ServerSettings) -> dict[str, Argument]:
    """Options of Sarathi-Serve's API server; its ``chunk_size`` counts the decodes of the iteration too."""
    return {
        "scheduler_config_type": "sarathi",
        "sarathi_scheduler_config_chunk_size": settings.token_budget,
        "sarathi_scheduler_config_max_num_seqs": settings.max_num_seqs,
        "model_config_max_model_len": settings.max_model_len,
        "model_config_dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "parallel_config_tensor_parallel_size": settings.tensor_parallel,
        "parallel_config_pipeline_parallel_size": settings.pipeline_parallel,
    }


def to_flags(arguments: dict[str, Argument], *, separator: str = "-") -> str:
    """Arguments as command-line flags; a true flag stands alone, a false one is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", separator)
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, shlex.quote(str(value))]
    return " ".join(words)
