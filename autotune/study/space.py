"""The budgets worth trying: on the device's edges, one token past them, and between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import log

from ...engine.token_costs import TokenCosts

KINDS = ("aligned", "plus_one", "mid_tile")
WHOLE_PROMPT = "whole_prompt"

#: Neighbouring edges differ by at least this much; closer ones are one.
MIN_EDGE_RATIO = 1.06


#: Budgets whose logarithms differ by no more than this are in each other's reach: what one does tells of the other.
REACH = 0.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One budget of the space: ``kind`` says where it lies relative to the edge at ``edge_tokens``. ``max_num_seqs``
    and ``policy`` are what it runs with where the study searches these too, else None: the study's own."""

    token_budget: int
    kind: str
    edge_tokens: int
    max_num_seqs: int | None = None
    policy: str | None = None

    def __str__(self) -> str:
        """The budget in words, ``512``; with what else was searched, ``512 (max_num_seqs 64, policy sarathi)``."""
        found = [("max_num_seqs", self.max_num_seqs), ("policy", self.policy)]
        note = ", ".join(f"{name} {value}" for name, value in found if value is not None)
        return f"{self.token_budget} ({note})" if note else str(self.token_budget)

    @property
    def run_suffix(self) -> str:
        """What tells its runs from those of other candidates, in their names: ``512``, ``512-64-sarathi``."""
        parts = (self.token_budget, self.max_num_seqs, self.policy)
        return "-".join(str(part) for part in parts if part is not None)


class SearchSpace:
    """Candidate budgets in ``[min_budget, max_budget]``, addressed by edge index and offset kind.

    ``edges`` (token counts after which one more token costs a step) give for each edge e the budgets e, e + 1
    and the middle between e and the next edge. ``whole_prompt`` adds the budget at which every prompt of the
    workload fits one iteration beside a full set of decodes: chunking switched off, even above ``max_budget``.
    ``costs`` is what an iteration costs by its tokens, None where it is not known.
    A study that searches ``max_num_seqs`` or ``policy`` has one such space for each combination: the one of the study's
    own settings, and ``others``, all of them its ``variants``. Without a search of these both are None.
    Raises ValueError when nothing lies inside the bounds.
    """

    def __init__(
        self,
        edges: Iterable[int],
        *,
        min_budget: int,
        max_budget: int,
        whole_prompt: int | None = None,
        costs: TokenCosts | None = None,
        max_num_seqs: int | None = None,
        policy: str | None = None,
        others: Sequence[SearchSpace] = (),
    ) -> None:
        self.costs = costs
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.variants: tuple[SearchSpace, ...] = (self, *others)
        inside = sorted({edge for edge in edges if min_budget <= edge <= max_budget})
        # Without an edge inside the bounds the bounds themselves are all there is to compare.
        self.edges = tuple(inside or sorted({min_budget, max_budget}))
        self.min_budget = min_budget
        self.max_budget = max_budget
        self.whole_prompt_tokens = whole_prompt
        if min_budget < 1 or max_budget < min_budget:
            raise ValueError(f"min_budget={min_budget}, max_budget={max_budget}: need 1 <= min_budget <= max_budget")
        self._by_params: dict[tuple[int, str], Candidate] = {}
        taken: set[int] = set()
        for kind in KINDS:  # aligned first, so that a budget that is both counts as aligned
            for index, edge in enumerate(self.edges):
                budget = self._budget(index, kind)
                if budget is not None and budget not in taken:
                    taken.add(budget)
                    self._by_params[index, kind] = self._candidate(budget, kind, edge)
        if whole_prompt is not None and whole_prompt not in taken and whole_prompt >= min_budget:
            index = self._edge_index_below(whole_prompt)
            self._by_params[index, WHOLE_PROMPT] = self._candidate(whole_prompt, WHOLE_PROMPT, self.edges[index])

    @property
    def settings(self) -> dict[str, int | str]:
        """What is searched besides the budget, as parameters of a trial."""
        found = {"max_num_seqs": self.max_num_seqs, "policy": self.policy}
        return {name: value for name, value in found.items() if value is not None}

    def variant(self, settings: Mapping[str, int | str]) -> SearchSpace:
        """The variant of a trial's parameters. Raises KeyError for settings that are not searched."""
        for variant in self.variants:
            if all(settings.get(name) == value for name, value in variant.settings.items()):
                return variant
        raise KeyError(f"{settings}: no such variant")

    def variant_of(self, candidate: Candidate) -> SearchSpace:
        """The variant that ``candidate`` belongs to."""
        found = {"max_num_seqs": candidate.max_num_seqs, "policy": candidate.policy}
        return self.variant({name: value for name, value in found.items() if value is not None})

    def alone(self) -> SearchSpace:
        """This variant as the only one."""
        single = copy(self)
        single.variants = (single,)
        return single

    def find(self, token_budget: int, max_num_seqs: int | None, policy: str) -> Candidate | None:
        """The candidate of any variant that a run with these settings ran; None where there is none."""
        for variant in self.variants:
            if variant.max_num_seqs == max_num_seqs and variant.policy in (None, policy):
                params = variant.params_of(token_budget)
                return None if params is None else variant.at(*params)
        return None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate of this variant, by budget."""
        return tuple(sorted(self._by_params.values(), key=lambda candidate: candidate.token_budget))

    @property
    def params(self) -> tuple[tuple[int, str], ...]:
        """Every (edge index, kind) pair that has a candidate."""
        return tuple(self._by_params)

    @property
    def whole_prompt(self) -> Candidate | None:
        """The smallest candidate that switches chunking off; None when ``whole_prompt`` was not given."""
        needed = self.whole_prompt_tokens
        return next((one for one in self.candidates if needed is not None and one.token_budget >= needed), None)

    def at(self, edge_index: int, kind: str) -> Candidate | None:
        """The candidate of one parameter pair; None where it leaves the bounds or repeats another."""
        return self._by_params.get((edge_index, kind))

    def budget_at(self, edge_index: int, kind: str) -> int:
        """The budget of a parameter pair that has a candidate. Raises KeyError for another one."""
        return self._by_params[edge_index, kind].token_budget

    def params_of(self, token_budget: int) -> tuple[int, str] | None:
        """The parameter pair that gives ``token_budget``; None where it is no candidate."""
        for params, candidate in self._by_params.items():
            if candidate.token_budget == token_budget:
                return params
        return None

    def partner(self, candidate: Candidate) -> Candidate | None:
        """The candidate across the edge from ``candidate``: e + 1 for e, e for what lies past it."""
        kind = "plus_one" if candidate.kind == "aligned" else "aligned"
        return self._by_params.get((self._edge_index_below(candidate.edge_tokens), kind))

    def ladder(self, rungs: int) -> tuple[Candidate, ...]:
        """Aligned candidates nearest to a geometric ladder over the space: what a search starts from. Where costs are
        known, the peaks of the staircase nearest to it."""
        aligned = [candidate for (_, kind), candidate in self._by_params.items() if kind == "aligned"]
        peaks = [candidate for candidate in self.cheapest_around() if candidate.kind == "aligned"]
        low, high = aligned[0].token_budget, aligned[-1].token_budget
        picked: dict[int, Candidate] = {}
        for rung in range(rungs):
            target = low * (high / low) ** (rung / max(1, rungs - 1))
            nearest = min(peaks or aligned, key=lambda candidate: abs(candidate.token_budget / target - 1.0))
            picked[nearest.token_budget] = nearest
        return tuple(picked.values())

    def cheapest_around(self) -> tuple[Candidate, ...]:
        """Candidates at which a token costs no more than at any other within ``REACH``: the peaks of the staircase.
        Empty where costs are not known."""
        if self.costs is None:
            return ()
        costs = {one.token_budget: self._token_cost(one) for one in self.candidates}
        return tuple(
            one
            for one in self.candidates
            if costs[one.token_budget]
            <= min(cost for budget, cost in costs.items() if abs(log(budget / one.token_budget)) <= REACH)
        )

    def _token_cost(self, candidate: Candidate) -> float:
        if self.costs is None:
            raise AssertionError("costs are asked for where there are none")
        return self.costs.at(candidate.token_budget) / candidate.token_budget

    def _candidate(self, budget: int, kind: str, edge: int) -> Candidate:
        return Candidate(
            token_budget=budget, kind=kind, edge_tokens=edge, max_num_seqs=self.max_num_seqs, policy=self.policy
        )

    def _edge_index_below(self, tokens: int) -> int:
        return max(0, bisect_right(self.edges, tokens) - 1)

    def _budget(self, index: int, kind: str) -> int | None:
        edge = self.edges[index]
        if kind == "aligned":
            budget = edge
        elif kind == "plus_one":
            budget = edge + 1
        else:
            following = self.edges[index + 1] if index + 1 < len(self.edges) else self.max_budget
            budget = (edge + following) // 2
        return budget if self.min_budget <= budget <= self.max_budget else None


def thin_edges(edges: Iterable[int], *, min_ratio: float = MIN_EDGE_RATIO) -> tuple[int, ...]:
    """The edges with crowded ones left out: neighbours differ by at least ``min_ratio``.

    Of a crowd the edge divisible by the highest power of two stays, as it is an edge for the most tile sizes.
    """
    kept: list[int] = []
    for edge in sorted(set(edges)):
        if kept and edge < kept[-1] * min_ratio:
            if edge & -edge > kept[-1] & -kept[-1]:
                kept[-1] = edge
            continue
        kept.append(edge)
    return tuple(kept)
