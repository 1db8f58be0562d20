"""The shape of a decoder-only model, and the built-in shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.errors import did_you_mean
from ...kernels.model_shape import ModelShape

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base ``theta``, and how its frequencies are stretched.

    ``rope_type`` is ``default``, ``linear`` (all frequencies divided by ``factor``) or ``llama3`` (long wavelengths
    divided by ``factor``, short ones kept, between ``low_freq_factor`` and ``high_freq_factor`` blended).
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r}: must be one of {', '.join(ROPE_TYPES)}")
        for name in ("theta", "factor", "low_freq_factor", "original_max_position"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(f"high_freq_factor={self.high_freq_factor}: must be above {self.low_freq_factor}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer.

    ``qkv_bias``, ``o_bias``, ``mlp_bias`` say which linear layers add a bias; ``qk_norm`` that queries and keys are
    normalised by head (Qwen3); ``gated_mlp`` that the MLP is ``down(silu(gate) * up)``, otherwise ``down(gelu(up))``.
    ``max_position`` is the longest context in tokens; a sliding window caps it, because a context inside the
    window is attended to in full. Raises ValueError naming field, value and rule.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, rotary embedding turns pairs")

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads; values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size

    @property
    def shape(self) -> ModelShape:
        """The integers that the cost of the layers depends on."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            vocab_size=self.vocab_size,
            gated=self.gated_mlp,
            name=self.name,
        )

    @property
    def num_parameters(self) -> int:
        """Weights and biases; tied embeddings count once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv, up = self.q_size + 2 * self.kv_size, inner * (2 if self.gated_mlp else 1)
        layer = hidden * (qkv + self.q_size + up + inner) + 2 * hidden
        layer += self.qkv_bias * qkv + self.o_bias * hidden + self.mlp_bias * (up + hidden)
        layer += self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + hidden

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The built-in architecture ``name``, or that of a hub id; raises ValueError listing the names that exist."""
        preset = preset_name(name)
        if preset is None:
            near = did_you_mean(name, _SPELLINGS.values())
            raise ValueError(
                f"model={name!r}: must be a folder with a config.json, or one of {', '.join(PRESETS)}, "
                f"or the hub id of one of these{near}"
            )
        return PRESETS[preset]


_LLAMA_3_1_ROPE = RopeConfig(
    theta=500000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)

#: The checkpoints on the Hugging Face hub whose config.json has the shape of a preset, in every field that
#: ``ModelConfig`` has; the first is the default. Left out for other shapes: Mistral v0.1 and v0.2 (vocabulary, window),
#: Yi-34B of 4K, Qwen2.5-7B and Qwen3-8B-Base (longest context). tiny-llama is ours and on no hub.
HUB_IDS: dict[str, tuple[str, ...]] = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
    "yi-34b": ("01-ai/Yi-34B-200K",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "falcon-180b": ("tiiuae/falcon-180B", "tiiuae/falcon-180B-chat"),
}


def preset_name(model: str) -> str | None:
    """The preset that ``model`` names, by its own name or by a hub id, in any letter case; None where there is none."""
    word = _SPELLINGS.get(model.lower())
    return next((name for name in PRESETS if word in (name, *HUB_IDS.get(name, ()))), None)


def hub_id(model: str) -> str | None:
    """The hub id, in its own spelling, that ``model`` is, or else its preset's default; None where there is none."""
    word = _SPELLINGS.get(model.lower())
    return HUB_IDS.get(word, (None,))[0] if word in PRESETS else word


#: Shapes as published in each model's config.json; with random weights the time is that of the real model.
#: - tiny-llama is ours: it makes token budgets differ visibly on two CPU cores.
#: - mistral-7b is v0.3, which has no sliding window; yi-34b is the 200K one, same shapes as the 4K one.
#: - falcon-180b is the nearest that this block allows: its 8 KV heads, ungated GELU MLP and sizes are kept; its
#:   parallel attention with LayerNorm becomes our sequential block with RMSNorm, which moves the same data
#:   through the same matrix products.
PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig(
            name="tiny-llama",
            vocab_size=2048,
            hidden_size=256,
            num_layers=4,
            num_heads=8,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=704,
            max_position=4096,
        ),
        ModelConfig(
            name="llama-2-7b",
            vocab_size=32000,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            intermediate_size=11008,
            max_position=4096,
        ),
        ModelConfig(
            name="llama-2-70b",
            vocab_size=32000,
            hidden_size=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=28672,
            max_position=4096,
        ),
        ModelConfig(
            name="llama-3.1-8b",
            vocab_size=128256,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            max_position=131072,
            rope=_LLAMA_3_1_ROPE,
        ),
        ModelConfig(
            name="llama-3.1-70b",
            vocab_size=128256,
            hidden_size=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=28672,
            max_position=131072,
            rope=_LLAMA_3_1_ROPE,
        ),
        ModelConfig(
            name="mistral-7b",
            vocab_size=32768,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            max_position=32768,
            rope=RopeConfig(theta=1000000.0),
        ),
        ModelConfig(
            name="yi-34b",
            vocab_size=64000,
            hidden_size=7168,
            num_layers=60,
            num_heads=56,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=20480,
            max_position=200000,
            rope=RopeConfig(theta=10000000.0),
        ),
        ModelConfig(
            name="qwen2.5-7b",
            vocab_size=152064,
            hidden_size=3584,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=18944,
            max_position=32768,
            rope=RopeConfig(theta=1000000.0),
            rms_norm_eps=1e-6,
            qkv_bias=True,
        ),
        ModelConfig(
            name="qwen3-8b",
            vocab_size=151936,
            hidden_size=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=12288,
            max_position=40960,
            rope=RopeConfig(theta=1000000.0),
            rms_norm_eps=1e-6,
            qk_norm=True,
        ),
        ModelConfig(
            name="falcon-180b",
            vocab_size=65024,
            hidden_size=14848,
            num_layers=80,
            num_heads=232,
            num_kv_heads=8,
            head_dim=64,
            intermediate_size=59392,
            max_position=2048,
            gated_mlp=False,
        ),
    )
}

#: Every name of a preset, in its own spelling, by the same in lower case.
_SPELLINGS = {name.lower(): name for name in (*PRESETS, *(one for ids in HUB_IDS.values() for one in ids))}
