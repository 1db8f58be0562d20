from __future__ import annotations

import pytest
from tilebudget.engine import EngineConfig
from tilebudget.engine.server.command import served_model, template_command

CONFIG = EngineConfig(token_budget=768, max_num_seqs=64, max_model_len=4096)


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    template = "x {model} -n {token_budget} -p {port} -s {max_num_seqs} -l {max_model_len} -O '{\"level\": 3}'"
    filled = template_command(template, model="/a folder")(CONFIG, 8123)
    assert filled == "x '/a folder' -n 768 -p 8123 -s 64 -l 4096 -O '{\"level\": 3}'"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("vllm serve m --port {port}", r"must have \{token_budget\}"),
        ("vllm serve m -n {token_budget}", r"must have \{port\}"),
        ("vllm serve m -n {token_budget} --port {port} {budget}", r"\{budget\} is no placeholder; there are "),
        ("vllm serve 'm -n {token_budget} --port {port}", "No closing quotation"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template_command(template, model="m")


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("A=1 vllm serve meta/Llama --port {port}", "meta/Llama"),
        ("vllm serve --port 3 --model=x", "x"),
        ("python -m sglang.launch_server --model-path q/w --tp 2", "q/w"),
        ("trtllm-serve serve some/model --tp_size 2", "some/model"),
        ("trtllm-serve some/model", "some/model"),
        ("./start.sh {token_budget}", None),
    ],
)
def test_the_model_is_read_off_the_command(command: str, model: str | None) -> None:
    assert served_model(command) == model
