from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from made_up_table import make_table
from tilebudget.autotune import (
    Key,
    NearestMatchWarning,
    Recommendation,
    RecommendationMismatchError,
    RecommendationNotFoundError,
    load_recommendation,
    save_recommendation,
)
from tilebudget.autotune.recommendation import exports
from tilebudget.autotune.recommendation.recommendation import EngineSettings, Figure, SLOInfo
from tilebudget.autotune.recommendation.verdict import staircase_sentence


def make(*, budget: int | None = 512, device: str = "a100_sxm") -> Recommendation:
    return Recommendation(
        status="feasible",
        token_budget=budget,
        verdict="Set it.",
        rule="rule",
        key=Key(model="llama-3.1-8b", device=device, dtype="bf16", tensor_parallel=2),
        slo=SLOInfo(
            name="strict", tbt_p99_ms=100.0, scheduling_delay_p50_s=2.0, reference_decode_ms=20.0, note="as wanted"
        ),
        expected={"tbt_p99_ms": Figure(value=80.0, low=78.0, high=83.0, repeats=3)},
        alternatives=[],
        engine=EngineSettings(
            model="llama-3.1-8b", policy="sarathi", max_num_seqs=128, max_model_len=8192, block_size=16, num_kv_blocks=9
        ),
        workload={"name": "toy"},
        num_trials={"complete": 1},
        seed=0,
        command="tilebudget tune",
        created_at="2026-01-01T00:00:00+00:00",
    )


def test_json_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "recommendation.json"
    file.write_text(json.dumps(make().to_json()))
    assert Recommendation.load(file) == make()
    assert Recommendation.load(tmp_path) == make()
    assert load_recommendation(tmp_path) == make()


def test_another_major_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recommendation.json"
    file.write_text(json.dumps({**make().to_json(), "schema_version": "2.0"}))
    with pytest.raises(ValueError, match=r"recommendation.json: schema_version='2.0': this release reads schema 1"):
        Recommendation.load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must hold a JSON object, holds list"),
        ('{"schema_version": "1.0"}', "not a recommendation: status, token_budget, .* missing"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"broken.json: {message}"):
        load_recommendation(file)


def test_a_recommendation_for_something_else_is_refused_with_both_keys() -> None:
    """Case 14."""
    tuned = make()
    tuned.assert_matches(model="llama-3.1-8b", device="a100_sxm", dtype="bf16", tensor_parallel=2)
    with pytest.raises(RecommendationMismatchError) as caught:
        tuned.assert_matches(model="llama-3.1-8b", device="h100_sxm", dtype="bf16", tensor_parallel=4)
    message = str(caught.value)
    assert "device, tensor_parallel differ" in message
    assert "tuned for model=llama-3.1-8b, device=a100_sxm, dtype=bf16, tensor_parallel=2" in message
    assert "asked for model=llama-3.1-8b, device=h100_sxm, dtype=bf16, tensor_parallel=4" in message


@pytest.mark.parametrize(
    "other", [{"model": "x"}, {"device": "h100_sxm"}, {"dtype": "fp8"}, {"tensor_parallel": 4}], ids=str
)
def test_each_part_of_the_key_counts(other: dict[str, object]) -> None:
    with pytest.raises(RecommendationMismatchError, match=next(iter(other))):
        make().assert_matches(**other)  # type: ignore[arg-type]


def test_store_finds_by_key_and_says_what_it_has() -> None:
    save_recommendation(make())
    save_recommendation(make(device="h200_sxm", budget=1024))
    assert load_recommendation("llama-3.1-8b", device="h200_sxm").token_budget == 1024
    with pytest.raises(ValueError, match="several recommendations fit"):
        load_recommendation("llama-3.1-8b")
    with pytest.raises(
        RecommendationNotFoundError, match=r"no recommendation for model=llama-3.1-8b, device=l40s; .*h200"
    ):
        load_recommendation("llama-3.1-8b", device="l40s")


def test_store_finds_an_entry_by_its_name() -> None:
    file = save_recommendation(make())
    assert load_recommendation(file.stem) == make()
    assert load_recommendation("llama-3.1-8b--a100_sxm--bf16--2--1", device="a100_sxm") == make()
    with pytest.raises(RecommendationMismatchError):
        load_recommendation(file.stem, device="h100_sxm")


def test_the_nearest_is_only_taken_when_asked_for_and_says_so() -> None:
    for device, budget in (("a100_sxm", 512), ("h200_sxm", 1024)):
        save_recommendation(make(device=device, budget=budget))
    with pytest.raises(RecommendationNotFoundError):
        load_recommendation("llama-3.1-8b", device="h200_sxm", tensor_parallel=4)
    with pytest.warns(NearestMatchWarning, match=r"nearest was tuned for .*h200_sxm.* \(tensor_parallel differ\)"):
        nearest = load_recommendation("llama-3.1-8b", device="h200_sxm", tensor_parallel=4, allow_nearest=True)
    assert nearest.token_budget == 1024
    with pytest.raises(RecommendationNotFoundError, match="model=yi-34b"):
        load_recommendation("yi-34b", allow_nearest=True)


def test_a_path_without_an_answer_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    for path, message in ((tmp_path, "a folder without recommendation.json"), (tmp_path / "text", "not end in .json")):
        with pytest.raises(RecommendationNotFoundError, match=message):
            load_recommendation(path)
    (tmp_path / "study.journal").touch()
    with pytest.raises(RecommendationNotFoundError, match="whose study has not finished; the store has"):
        load_recommendation(tmp_path)
    with pytest.raises(ValueError, match="model='': must be a run folder, a JSON file, or a name in the store"):
        load_recommendation("")


def test_an_exact_match_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    save_recommendation(make())
    assert load_recommendation("llama-3.1-8b", device="a100_sxm", allow_nearest=True) == make()
    assert not [warning for warning in recwarn if warning.category is NearestMatchWarning]


@dataclass
class EngineArgs:
    """The fields of vLLM's class that a recommendation touches, with its defaults."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None


def test_apply_to_sets_what_shapes_an_iteration() -> None:
    given = EngineArgs(tensor_parallel_size=2, max_model_len=4096)
    assert make().apply_to(given) is given
    assert given == EngineArgs(
        tensor_parallel_size=2,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
    )
    assert make().apply_to(EngineArgs(tensor_parallel_size=2, enable_prefix_caching=True)).enable_prefix_caching


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (EngineArgs(), "tensor_parallel_size is 1, tuned for 2"),
        (EngineArgs(tensor_parallel_size=2, dtype="float16"), "dtype is float16, tuned for bfloat16"),
        (EngineArgs(tensor_parallel_size=2, quantization="awq"), "quantization is awq, tuned for None"),
    ],
    ids=str,
)
def test_apply_to_refuses_another_engine_and_changes_nothing(given: EngineArgs, message: str) -> None:
    before = replace(given)
    with pytest.raises(RecommendationMismatchError, match=message):
        make().apply_to(given)
    assert given == before


def test_apply_to_needs_engine_arguments() -> None:
    with pytest.raises(ValueError, match=r"target=object: has no max_num_batched_tokens, .*needs vLLM's engine arg"):
        make().apply_to(object())


def test_an_environment_file_knows_no_quotes() -> None:
    assert exports.to_environment({"a": 1, "b": False}) == "A=1\nB=false"
    with pytest.raises(ValueError, match="a='x y': cannot stand in an environment file"):
        exports.to_environment({"a": "x y"})


def test_a_path_with_another_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recommendation.json"
    file.write_text(json.dumps(make().to_json()))
    with pytest.raises(RecommendationMismatchError):
        load_recommendation(file, tensor_parallel=4)


def test_vllm_arguments() -> None:
    assert make().vllm_args() == {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 128,
        "max_model_len": 8192,
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
    }
    assert make().export("vllm").startswith("--max-num-batched-tokens 512 --max-num-seqs 128 --max-model-len 8192 ")


def test_sglang_counts_prefill_tokens_only_and_divides_by_the_page() -> None:
    assert make().sglang_args()["chunked_prefill_size"] == 512 - 128
    assert make().sglang_args(page_size=64)["chunked_prefill_size"] == 384
    assert make(budget=192).sglang_args(page_size=64)["chunked_prefill_size"] == 64
    with pytest.raises(ValueError, match="page_size=64: must be at most 32, what a budget of 160 tokens leaves beside"):
        make(budget=160).sglang_args(page_size=64)
    with pytest.raises(ValueError, match="page_size=0: must be at least 1"):
        make().sglang_args(page_size=0)


def test_trtllm_rounds_to_the_block_but_never_below_the_batch() -> None:
    assert make(budget=513).trtllm_args()["max_num_tokens"] == 512
    assert make(budget=130).trtllm_args()["max_num_tokens"] == 128
    assert make(budget=127).trtllm_args()["max_num_tokens"] == 127


def test_sarathi_and_launch_lines() -> None:
    assert "--sarathi_scheduler_config_chunk_size 512" in make().export("sarathi")
    hub_id = "meta-llama/Llama-3.1-8B-Instruct"
    assert make().launch_commands()["vllm"].startswith(f"vllm serve {hub_id} --max-num-batched-tokens 512")
    own = replace(make(), engine=replace(make().engine, model_name="my/llama"))
    assert own.launch_commands()["sglang"].startswith("python -m sglang.launch_server --model-path my/llama ")
    assert make(budget=None).launch_commands() == make(budget=None).server_flags() == {}
    assert make().to_json()["flags"] == {name: make().export(name) for name in ("vllm", "sglang", "trtllm", "sarathi")}
    with pytest.raises(ValueError, match="token_budget=None"):
        make(budget=None).vllm_args()
    with pytest.raises(ValueError, match="format='tgi': must be one of vllm, sglang"):
        make().export("tgi")


def test_fp8_is_a_quantization_for_vllm_and_sglang() -> None:
    fp8 = exports.ServerSettings(
        token_budget=1024, max_num_seqs=128, max_model_len=4096, dtype="fp8", tensor_parallel=1, pipeline_parallel=1
    )
    bf16 = replace(fp8, dtype="bf16")
    for arguments in (exports.vllm_args, exports.sglang_args):
        assert arguments(fp8)["quantization"] == "fp8"
        assert arguments(fp8)["dtype"] == arguments(fp8)["kv_cache_dtype"] == "bfloat16"
        assert not arguments(bf16).keys() & {"quantization", "kv_cache_dtype"}


def with_engine(**changes: object) -> Recommendation:
    return replace(make(), engine=replace(make().engine, **changes))  # type: ignore[arg-type]


def test_launch_lines_carry_what_the_study_assumed_and_a_server_does_not() -> None:
    fixed = with_engine(block_size=32, num_kv_blocks=1000, kv_blocks_fixed=True).launch_commands()
    assert fixed["vllm"].endswith("--no-enable-prefix-caching --block-size 32 --num-gpu-blocks-override 1000")
    assert fixed["sglang"].endswith("--disable-radix-cache --max-total-tokens 32000")
    found = make().launch_commands()  # 9 blocks of 16, read off free memory
    assert found["vllm"].endswith("--enable-chunked-prefill --no-enable-prefix-caching")
    assert found["sglang"].endswith("--pp-size 1 --disable-radix-cache")
    assert make().export("vllm-yaml").splitlines()[-1] == "no-enable-prefix-caching: true"
    assert make().export("env").splitlines()[-1] == "ENABLE_PREFIX_CACHING=false"
    assert '- "--no-enable-prefix-caching"' in make().export("kubernetes")


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ({}, "meta-llama/Llama-3.1-8B-Instruct"),
        ({"model_name": "meta-llama/Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B"),
        ({"model_name": "my-org/my-llama"}, "my-org/my-llama"),
        ({"model": "./my-llama"}, "./my-llama"),
        ({"model": "tiny-llama"}, "tiny-llama"),
    ],
    ids=str,
)
def test_launch_lines_name_a_model_that_a_server_can_load(engine: dict[str, object], name: str) -> None:
    recommendation = with_engine(**engine)
    assert recommendation.launch_commands()["vllm"].startswith(f"vllm serve {name} --")
    assert recommendation.export("vllm-yaml").startswith(f'model: "{name}"\n')
    assert f'- "{name}"' in recommendation.export("kubernetes")
    assert (recommendation.launch_notice is not None) == (name == "tiny-llama")


def test_the_store_finds_a_model_by_its_hub_id_and_a_device_in_any_words() -> None:
    save_recommendation(make(device="h100_sxm"))
    for model in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "META-LLAMA/meta-llama-3.1-8b"):
        assert load_recommendation(model, device="H100", dtype="bfloat16").key.device == "h100_sxm"
    load_recommendation("llama-3.1-8b").assert_matches(model="meta-llama/Llama-3.1-8B")


def test_the_verdict_says_where_the_staircase_is_interpolated() -> None:
    table = make_table()  # measured at 192 and 193, then at 256, 257 and 1024
    assert "(none 1) prices one more token" in staircase_sentence(table, 192)
    assert ", interpolated here between 193 and 256 tokens)" in staircase_sentence(table, 200)
    assert ", interpolated here between 257 and 1024 tokens)" in staircase_sentence(table, 257)
    assert ", extrapolated here)" in staircase_sentence(table, 2000)


@pytest.mark.parametrize("name", ["", "Bad Name!", "-a", "a-", "x" * 64])
def test_a_container_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"container=.*: must be lower-case letters, digits and inner hyphens"):
        make().export("kubernetes", container=name)
