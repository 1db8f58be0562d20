"""A recommended budget in the words of each server. Meanings are converted, not only names.

vLLM's budget counts decodes; SGLang's ``chunked_prefill_size`` counts prefill tokens only, and with mixed chunks the
decodes come on top; TensorRT-LLM's documents suggest a multiple of ``tokens_per_block``; Sarathi-Serve's
``chunk_size`` counts all tokens of an iteration.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

Argument = str | int | bool

#: What an engine's arguments must already say, because the budget holds for nothing else.
VLLM_FIXED = ("tensor_parallel_size", "pipeline_parallel_size", "dtype", "quantization")

#: The policy that no chunked prefill stands for.
PREFILL_FIRST = "vllm_v0"

#: Engine arguments of vLLM that stay as they are where they are set: the budget holds within them too.
VLLM_KEPT = ("max_model_len", "enable_prefix_caching")

TRTLLM_TOKENS_PER_BLOCK = 64
VLLM_BLOCK_SIZE = 16
#: fp8 is a quantization of the weights (``_quantization``); what runs between the linear layers is bf16.
VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a recommendation fixes, in our words; every export translates these.

    ``block_size``: tokens per KV block. ``num_kv_blocks``: those that were asked for, None where free memory decides.
    No prefix is shared between requests, so every export turns that off where a flag does.
    """

    token_budget: int
    max_num_seqs: int
    max_model_len: int
    dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    policy: str = "sarathi"
    block_size: int = VLLM_BLOCK_SIZE
    num_kv_blocks: int | None = None


def has(server: str, policy: str) -> bool:
    """Whether ``server`` can run a recommendation for ``policy``: prefill first, as vLLM v0 did, vLLM and TensorRT-LLM
    cannot."""
    return policy != PREFILL_FIRST or server in ("sglang", "sarathi")


def _check_policy(server: str, settings: ServerSettings) -> None:
    if not has(server, settings.policy):
        raise ValueError(
            f"policy={settings.policy!r}: {server} always batches decodes with prefills; export for sglang or sarathi, "
            "or tune with policy=sarathi"
        )


def vllm_args(settings: ServerSettings) -> dict[str, Argument]:
    """Engine arguments of vLLM; its budget counts decodes and must be at least ``max_num_seqs``, as ours."""
    _check_policy("vllm", settings)
    return {
        "max_num_batched_tokens": settings.token_budget,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        **_quantization(settings.dtype),
        **({} if settings.block_size == VLLM_BLOCK_SIZE else {"block_size": settings.block_size}),
        **({} if settings.num_kv_blocks is None else {"num_gpu_blocks_override": settings.num_kv_blocks}),
    }


def sglang_args(settings: ServerSettings, *, page_size: int = 1) -> dict[str, Argument]:
    """Server arguments of SGLang. A full set of decodes is taken off the budget, because with mixed chunks they come on
    top of the chunk; the rest is rounded down to a multiple of ``page_size``, which it must hold. Prefill first, there
    are no chunks, and the budget is that of a batch of prompts."""
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: must be at least 1")
    left = max(1, settings.token_budget - settings.max_num_seqs)
    if settings.policy == PREFILL_FIRST:
        batches: dict[str, Argument] = {"chunked_prefill_size": -1, "max_prefill_tokens": settings.token_budget}
    elif page_size > left:
        raise ValueError(
            f"page_size={page_size}: must be at most {left}, what a budget of {settings.token_budget} tokens leaves "
            f"beside {settings.max_num_seqs} decodes"
        )
    else:
        batches = {"chunked_prefill_size": left // page_size * page_size, "enable_mixed_chunk": True}
    return {
        **batches,
        "page_size": page_size,
        "max_running_requests": settings.max_num_seqs,
        "context_length": settings.max_model_len,
        "dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "tp_size": settings.tensor_parallel,
        "pp_size": settings.pipeline_parallel,
        "disable_radix_cache": True,
        **_quantization(settings.dtype),
        **_sglang_pool(settings),
    }


def _sglang_pool(settings: ServerSettings) -> dict[str, Argument]:
    """SGLang counts its KV pool in tokens."""
    if settings.num_kv_blocks is None:
        return {}
    return {"max_total_tokens": settings.num_kv_blocks * settings.block_size}


def _quantization(dtype: str) -> dict[str, Argument]:
    """vLLM and SGLang take fp8 as a quantization of the weights, not as a dtype; the KV cache stays bf16, which an fp8
    checkpoint may have otherwise."""
    return {"quantization": "fp8", "kv_cache_dtype": "bfloat16"} if dtype == "fp8" else {}


def trtllm_args(settings: ServerSettings) -> dict[str, Argument]:
    """Options of ``trtllm-serve``; the budget is rounded down to a multiple of 64 (tokens_per_block) where it has one.

    Dtype and quantization are the checkpoint's, and only a configuration file turns off its reuse of KV blocks. A
    budget that rounding would bring below ``max_num_seqs`` stays as it is.
    """
    _check_policy("trtllm", settings)
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
    kind, budget = ("vllm", "max_batched_tokens") if settings.policy == PREFILL_FIRST else ("sarathi", "chunk_size")
    return {
        "scheduler_config_type": kind,
        f"{kind}_scheduler_config_{budget}": settings.token_budget,
        f"{kind}_scheduler_config_max_num_seqs": settings.max_num_seqs,
        "model_config_max_model_len": settings.max_model_len,
        "model_config_dtype": VLLM_DTYPES.get(settings.dtype, "auto"),
        "parallel_config_tensor_parallel_size": settings.tensor_parallel,
        "parallel_config_pipeline_parallel_size": settings.pipeline_parallel,
    }


#: The arguments of each server, by its name.
SERVER_ARGS: Mapping[str, Callable[[ServerSettings], dict[str, Argument]]] = {
    "vllm": vllm_args,
    "sglang": sglang_args,
    "trtllm": trtllm_args,
    "sarathi": sarathi_args,
}

#: What stands before the model in each server's launch line, and what joins the words of its flags.
_LAUNCHERS = {
    "vllm": ("vllm serve", "-"),
    "sglang": ("python -m sglang.launch_server --model-path", "-"),
    "trtllm": ("trtllm-serve", "_"),
    "sarathi": ("python -m sarathi.entrypoints.openai.api_server --model_config_model", "_"),
}


def server_flags(server: str, arguments: Mapping[str, Argument]) -> str:
    """``arguments`` as the flags of ``server``, one of ``SERVER_ARGS``."""
    return to_flags(arguments, separator=_LAUNCHERS[server][1])


def launch_line(server: str, model: str, arguments: Mapping[str, Argument]) -> str:
    """The whole launch line of ``server`` with ``arguments``."""
    return f"{_LAUNCHERS[server][0]} {shlex.quote(model)} {server_flags(server, arguments)}"


def to_words(arguments: Mapping[str, Argument], *, separator: str = "-") -> list[str]:
    """Arguments as the words of a command line; a true flag stands alone, a false one is its ``--no-`` form.

    >>> to_words({"max_num_seqs": 128, "enable_chunked_prefill": True, "enable_prefix_caching": False})
    ['--max-num-seqs', '128', '--enable-chunked-prefill', '--no-enable-prefix-caching']
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = ("no_" if value is False else "") + name
        words.append("--" + flag.replace("_", separator))
        if not isinstance(value, bool):
            words.append(str(value))
    return words


def to_flags(arguments: Mapping[str, Argument], *, separator: str = "-") -> str:
    """``to_words`` as one line for a shell."""
    return shlex.join(to_words(arguments, separator=separator))


def to_environment(arguments: Mapping[str, Argument]) -> str:
    """One ``NAME=value`` line an argument, in upper case, for ``docker --env-file`` and compose files.

    No value is quoted, for docker takes quotes literally. Raises ValueError for one that a shell would need quoted.

    >>> print(to_environment({"max_num_batched_tokens": 512, "enable_chunked_prefill": True}))
    MAX_NUM_BATCHED_TOKENS=512
    ENABLE_CHUNKED_PREFILL=true
    """
    lines = []
    for name, value in arguments.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if shlex.quote(text) != text:
            raise ValueError(f"{name}={text!r}: cannot stand in an environment file, which knows no quotes")
        lines.append(f"{name.upper()}={text}")
    return "\n".join(lines)


def to_vllm_yaml(model: str, arguments: Mapping[str, Argument]) -> str:
    """The file of ``vllm serve --config FILE``: flags without their dashes. vLLM reads over what is false in it, so a
    false flag is its true ``no-`` form.

    >>> print(to_vllm_yaml("llama", {"max_num_seqs": 128, "enable_prefix_caching": False}))
    model: "llama"
    max-num-seqs: 128
    no-enable-prefix-caching: true
    """
    rows: dict[str, Argument] = {"model": model}
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        rows |= {f"no-{flag}": True} if value is False else {flag: value}
    # A JSON scalar is a YAML scalar.
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in rows.items())


def to_kubernetes_patch(command: Sequence[str], arguments: Sequence[str], *, container: str) -> str:
    """A strategic merge patch for ``kubectl patch deployment NAME --patch-file FILE``.

    Lists of strings are replaced whole by such a patch, so it holds the container's whole command line. Raises
    ValueError for a ``container`` that Kubernetes would refuse as a name (RFC 1123 label).
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", container):
        raise ValueError(
            f"container={container!r}: must be lower-case letters, digits and inner hyphens, at most 63 of them"
        )
    lists = [
        f"          {name}:\n" + "\n".join(f"            - {json.dumps(word)}" for word in words)
        for name, words in (("command", command), ("args", arguments))
    ]
    return "\n".join(
        ["spec:", "  template:", "    spec:", "      containers:", f"        - name: {json.dumps(container)}", *lists]
    )


def apply_arguments(target: object, arguments: Mapping[str, Argument]) -> list[str]:
    """Set ``arguments`` on ``target`` (a mapping, or an object with attributes of these names) and return what differs.

    Those of ``VLLM_FIXED`` are compared; where ``target`` has them unset (absent, None, ``auto``) they are set too.
    Those of ``VLLM_KEPT`` are left as they are where they are set. When something differs nothing is changed. Raises
    ValueError for an object that lacks one of the attributes.
    """
    if isinstance(target, MutableMapping):
        present = {name: target.get(name) for name in (*arguments, *VLLM_FIXED)}
    else:
        absent = [name for name in arguments if not hasattr(target, name)]
        if absent:
            raise ValueError(
                f"target={type(target).__name__}: has no {', '.join(absent)}; needs vLLM's engine arguments"
            )
        present = {name: getattr(target, name, None) for name in (*arguments, *VLLM_FIXED)}
    differing = []
    for name in VLLM_FIXED:
        unset = present[name] in (None, "auto")
        if not unset and str(present[name]).removeprefix("torch.") != str(arguments.get(name)):
            differing.append(f"{name} is {present[name]}, tuned for {arguments.get(name)}")
    if differing:
        return differing
    for name, value in arguments.items():
        if name in VLLM_KEPT and present[name] is not None:
            continue
        if isinstance(target, MutableMapping):
            target[name] = value
        else:
            setattr(target, name, value)
    return []
