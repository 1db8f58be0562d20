"""Every form that is exported for vLLM, read by vLLM's own parser.

``TILEBUDGET_VLLM_PYTHON`` names an interpreter that has vLLM; without it this one is tried. Skipped where neither has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tilebudget.autotune import Recommendation
from tilebudget.autotune.recommendation import exports

EXAMPLE = Path(__file__).parent / "data" / "recommendation-1.0.json"
PYTHON = os.environ.get("TILEBUDGET_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="no vLLM here; TILEBUDGET_VLLM_PYTHON names its interpreter")

#: Reads {form: words of `vllm serve`} and prints {form: the engine arguments that vLLM understood}.
PARSE = """
import importlib.util, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
forms, environment, exports_file, arguments = json.load(sys.stdin)
def read(words):
    parser = FlexibleArgumentParser()
    serve = make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))
    args = parser.parse_args(["serve", *words])
    args.model = args.model_tag or args.model
    return vars(AsyncEngineArgs.from_cli_args(args))
found = {form: read(words) for form, words in forms.items()}
typed = {"true": True, "false": False}
number = lambda text: int(text) if text.isdigit() else text
values = {name.lower(): typed.get(value, number(value)) for name, value in environment.items()}
found["env"] = vars(AsyncEngineArgs(**values))
spec = importlib.util.spec_from_file_location("exports", exports_file)
exports = importlib.util.module_from_spec(spec)
sys.modules["exports"] = exports
spec.loader.exec_module(exports)
target = AsyncEngineArgs(tensor_parallel_size=2)
assert exports.apply_arguments(target, arguments) == []
found["apply_to"] = vars(target)
print("FOUND", json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What vLLM understood of each form."""
    recommendation = Recommendation.load(EXAMPLE)
    config = tmp_path_factory.mktemp("vllm") / "vllm.yaml"
    config.write_text(recommendation.export("vllm-yaml"))
    patch = yaml.safe_load(recommendation.export("kubernetes"))
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["vllm", "serve"]
    forms = {
        "flags": [recommendation.launch_model, *recommendation.export("vllm").split()],
        "launch": recommendation.launch_commands()["vllm"].split()[2:],
        "yaml": ["--config", str(config)],
        "kubernetes": container["args"],
    }
    environment = dict(line.split("=", 1) for line in recommendation.export("env").splitlines())
    done = subprocess.run(
        [str(PYTHON), "-c", PARSE],
        input=json.dumps([forms, environment, exports.__file__, recommendation.vllm_args()]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=config.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    result: dict[str, dict[str, object]] = json.loads(line.removeprefix("FOUND "))
    return result


@pytest.mark.parametrize("form", ["flags", "launch", "yaml", "kubernetes", "env", "apply_to"])
def test_vllm_reads_the_recommended_settings(found: dict[str, dict[str, object]], form: str) -> None:
    wanted = Recommendation.load(EXAMPLE).vllm_args()
    assert {name: found[form][name] for name in wanted} == wanted
    if form not in ("env", "apply_to"):
        assert found[form]["model"] == "meta-llama/Llama-3.1-8B-Instruct"
