"""Which iterations a profile times: chunks at prefixes, decodes at contexts, and pairs that tell shares apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...kernels.latency.measure import token_grid
from ...kernels.latency.table import IterationShape

#: Chunks of this many tokens tell what each further chunk of a batch costs.
SPLIT_CHUNK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ProfileGrid:
    """The iterations worth timing for batches of up to ``max_tokens`` tokens and ``max_num_seqs`` sequences of up to
    ``max_model_len`` tokens each, ``pool_tokens`` tokens in the KV cache together.

    Raises ValueError when a bound is below what one iteration needs.
    """

    max_num_seqs: int
    max_model_len: int
    max_tokens: int
    pool_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_model_len": 4, "max_tokens": 2, "block_size": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {value}")
        if self.pool_tokens < self.max_model_len:
            raise ValueError(
                f"pool_tokens={self.pool_tokens}: must hold one sequence of max_model_len={self.max_model_len}"
            )

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest chunk that leaves its prompt unfinished."""
        return min(self.max_model_len - 1, self.max_tokens)

    @property
    def most_seqs(self) -> int:
        """Sequences that the KV cache holds at once, at a block each."""
        return min(self.max_num_seqs, self.pool_tokens // self.block_size)

    @property
    def most_tokens(self) -> int:
        """The largest batch that the bounds allow."""
        room = self.pool_tokens - self.most_seqs * self.block_size  # the last block of each may be part empty
        most = min(self.max_tokens, self.most_seqs * self.longest_chunk, room)
        return most if most > self.longest_chunk + self.block_size else self.longest_chunk

    def chunk_rows(self, fine: bool) -> list[int]:
        """Chunk sizes of the attention surface."""
        rows = {1, SPLIT_CHUNK_TOKENS, 128, 512, self.longest_chunk}
        if fine:
            rows |= {64, 256, 1024, 2048, 4096}
        return sorted(row for row in rows if row <= self.longest_chunk)

    def prefixes(self, fine: bool) -> list[int]:
        """Prefixes of the attention surface: none, the shortest whole block, and up to the longest context."""
        longest = self.max_model_len - 2
        columns = {0, min(self.block_size, longest), longest // 2, longest}
        if fine:
            columns |= {longest // 8, longest // 4, 3 * longest // 4}
        return sorted(columns)

    def decode_rows(self, fine: bool) -> list[int]:
        """Numbers of decodes."""
        rows = {1, 4, self.most_seqs}
        if fine:
            rows |= {2, 8, 12, 16, 24, 32, 48, 64, 96, 128, self.most_seqs // 2}
        return sorted(row for row in rows if 1 <= row <= self.most_seqs)

    def contexts(self, fine: bool) -> list[int]:
        """Contexts of decodes, the new token among them."""
        longest = self.max_model_len - 1
        columns = {min(self.block_size, longest), longest // 2, longest}
        if fine:
            columns |= {longest // 8, longest // 4, 3 * longest // 4}
        return sorted(column for column in columns if column >= 2)

    def logits_rows(self, fine: bool) -> list[int]:
        """Rows through the vocabulary projection."""
        return self.decode_rows(fine)

    def token_candidates(self) -> list[int]:
        """Token counts that the sampler may choose from; `decode_rows` among them."""
        counts = {*token_grid(self.most_tokens), *self.decode_rows(True), *self.chunk_rows(True), self.most_tokens}
        return sorted(count for count in counts if count <= self.most_tokens)

    def tokens_shape(self, num_tokens: int) -> IterationShape:
        """A batch of so many prompt tokens at prefix 0 in as few chunks as hold them, none ending its prompt."""
        full, rest = divmod(num_tokens, self.longest_chunk)
        chunks = [(self.longest_chunk, 0)] * full + ([(rest, 0)] if rest else [])
        return IterationShape(chunks=tuple(chunks))

    def chunk_shape(self, chunk: int, prefix: int) -> IterationShape | None:
        """One chunk after a prefix; None where both together are longer than a sequence may be."""
        if chunk + prefix >= self.max_model_len:
            return None
        return IterationShape(chunks=((chunk, prefix),))

    def decode_shape(self, num_decodes: int, context: int) -> IterationShape | None:
        """Decodes at one context; None where the KV cache does not hold them."""
        blocks_each = -(-context // self.block_size)
        if num_decodes * blocks_each * self.block_size > self.pool_tokens:
            return None
        return IterationShape(num_decodes=num_decodes, decode_kv_tokens=num_decodes * context, num_logits=num_decodes)

    def logits_pair(self, rows: int) -> tuple[IterationShape, IterationShape]:
        """The same one-token chunks, with every one of them ending its prompt and with none."""
        chunks = ((1, 0),) * rows
        return IterationShape(chunks=chunks, num_logits=rows), IterationShape(chunks=chunks)

    def split_pair(self) -> tuple[IterationShape, IterationShape, int] | None:
        """The same tokens in several chunks and in one, and in how many; None where there is room for one only."""
        blocks_each = -(-SPLIT_CHUNK_TOKENS // self.block_size)
        room = self.pool_tokens // (blocks_each * self.block_size)
        count = min(8, self.max_num_seqs, self.longest_chunk // SPLIT_CHUNK_TOKENS, room)
        if count < 2:
            return None
        many = IterationShape(chunks=((SPLIT_CHUNK_TOKENS, 0),) * count)
        return many, self.tokens_shape(count * SPLIT_CHUNK_TOKENS), count

    def shapes(self, fine: bool) -> list[IterationShape]:
        """Every iteration of the coarse grid, or of the fine one, but for the sampler's token counts."""
        found: dict[IterationShape, None] = {}
        split = self.split_pair()
        decode_pairs = [(row, context) for row in self.decode_rows(fine) for context in self.contexts(fine)]
        candidates: Iterable[IterationShape | None] = [
            *(self.tokens_shape(row) for row in self.decode_rows(fine)),
            *(self.chunk_shape(row, prefix) for row in self.chunk_rows(fine) for prefix in self.prefixes(fine)),
            *(self.decode_shape(*pair) for pair in decode_pairs),
            *(shape for rows in self.logits_rows(fine) for shape in self.logits_pair(rows)),
            *(split[:2] if split else ()),
        ]
        for shape in candidates:
            if shape is not None:
                found[shape] = None
        return list(found)
