"""Readers of sweep files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tilebudget.kernels.latency.sweep import FOUR_GEMMS, Sweep, layer_sweep, read_sweeps


def write(tmp_path: Path, text: str, name: str = "sweep.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return path


def vidur_text(rows: list[tuple[int, int, float]], ops: tuple[str, ...] = ("mlp_up_proj",), eol: str = "\n") -> str:
    head = [f"time_stats.{op}.{stat}" for op in ops for stat in ("min", "median", "std")]
    lines = [",".join([*head, "n_embd", "num_tokens", "num_tensor_parallel_workers"])]
    for tokens, degree, median in rows:
        values = [f"{median * 0.9},{median},{median * 0.01}" for _ in ops]
        lines.append(",".join([*values, "4096", str(tokens), str(degree)]))
    return eol.join(lines) + eol


def test_vidur_rows_descend_and_duplicates_become_their_median(tmp_path: Path) -> None:
    path = write(tmp_path, vidur_text([(16, 1, 3.0), (16, 1, 5.0), (8, 1, 2.0), (8, 2, 1.0)]))
    file = read_sweeps(path)
    assert file.format == "vidur"
    assert file.degrees() == [1, 2]
    assert file.shape == {"n_embd": 4096}
    sweep = file.select(1)[0]
    assert sweep.tokens.tolist() == [8, 16]
    assert sweep.latency_ms.tolist() == [2.0, 4.0]
    assert sweep.std_ms is not None
    assert sweep.std_ms.tolist() == pytest.approx([0.02, 0.04])
    with pytest.raises(ValueError, match=r"tensor_parallel is 4: the file has \[1, 2\]"):
        file.select(4)


def test_plain_format_with_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = read_sweeps(write(tmp_path, "\ufefftokens, latency_ms\r\n128,1.5\r\n64,1.0\r\n"))
    (sweep,) = file.sweeps
    assert (sweep.op, sweep.tensor_parallel) == ("latency", 1)
    assert sweep.tokens.tolist() == [64, 128]
    assert sweep.at(128) == 1.5
    with pytest.raises(ValueError, match="tokens is 65: latency was not measured there"):
        sweep.at(65)


def test_plain_format_keeps_operations_and_degrees_apart(tmp_path: Path) -> None:
    file = read_sweeps(
        write(tmp_path, "op,tensor_parallel,tokens,latency_ms,std_ms\na,1,8,1,0.1\na,2,8,2,0.1\nb,1,8,3,0.1\n")
    )
    assert [(s.op, s.tensor_parallel, s.at(8)) for s in file.sweeps] == [("a", 1, 1.0), ("a", 2, 2.0), ("b", 1, 3.0)]


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    file = read_sweeps(write(tmp_path, "tokens,latency_ms\n8,1\n16,nan\n24,0\n32,-1\n40,oops\n48,2\n"))
    assert file.sweeps[0].tokens.tolist() == [8, 48]
    assert (file.num_rows, file.num_dropped) == (6, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a CSV table"),
        ("a,b\n1,2\n", "it needs num_tokens and time_stats"),
        ("tokens,latency_ms\n", "has no row with a latency above 0"),
        ("tokens,latency_ms\n0,1\n", "tokens is .*0.*whole number of 1 or more"),
        ("tokens,latency_ms\n1.5,1\n", "tokens is .*1.5.*whole number of 1 or more"),
        ("tokens,latency_ms\n8,nan\n", "has no row with a latency above 0"),
        (
            "time_stats.a.median,n_embd,num_tokens\n1,64,8\n1,128,8\n",
            "n_embd has values .*one model per file",
        ),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_sweeps(write(tmp_path, text))


@pytest.mark.parametrize(
    ("tokens", "latency_ms", "message"),
    [
        ([], [], "one or more counts"),
        ([8, 8], [1.0, 1.0], "must rise strictly"),
        ([0, 8], [1.0, 1.0], "must rise strictly from 1"),
        ([8], [1.0, 2.0], "2 values for 1 token counts"),
        ([8], [float("nan")], "finite and above 0"),
        ([8], [0.0], "finite and above 0"),
    ],
)
def test_sweep_refuses_what_is_no_sweep(tokens: list[int], latency_ms: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sweep(op="x", tokens=np.array(tokens, dtype=np.int64), latency_ms=np.array(latency_ms))


def test_layer_sum_uses_shared_token_counts_and_names_transfers() -> None:
    def part(op: str, tokens: list[int], source: str = "table") -> Sweep:
        return Sweep(op=op, tokens=np.array(tokens), latency_ms=np.array(tokens) * 0.5, source=source)

    parts = [part(op, [8, 16, 24]) for op in FOUR_GEMMS[:3]]
    layer = layer_sweep([*parts, part(FOUR_GEMMS[3], [16, 24, 32], "transferred")])
    assert layer.tokens.tolist() == [16, 24]
    assert layer.latency_ms.tolist() == [32.0, 48.0]
    assert (layer.source, layer.note) == ("transferred", "transferred: mlp_down_proj")
    with pytest.raises(ValueError, match="mlp_down_proj are not among the sweeps"):
        layer_sweep(parts)


def test_real_vidur_file(shared: Callable[[str], Path]) -> None:
    file = read_sweeps(shared("data/vidur_a100_llama2_7b_mlp.csv"))
    assert file.degrees() == [1, 2, 4, 8]
    assert file.shape["n_expanded_embd"] == 11008
    assert (file.num_rows, file.num_dropped) == (1044, 0)
    assert len(file.select(1)) == 10
    layer = layer_sweep(file.select(1))
    assert layer.tokens.size == 259
    # FACTS section 1: 512 tokens run at about 537 tokens/ms, 520 at 487.
    assert 512 / layer.at(512) == pytest.approx(537, abs=1)
    assert 520 / layer.at(520) == pytest.approx(487, abs=1)
