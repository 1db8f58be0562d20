"""The study, the scoring, the recommendation, and its API: ``tune`` and ``load_recommendation``."""

from .config import TuneConfig
from .recommendation.recommendation import Key, Recommendation, RecommendationMismatchError
from .recommendation.store import (
    NearestMatchWarning,
    RecommendationNotFoundError,
    load_recommendation,
    save_recommendation,
)
from .tuning import tune

__all__ = [
    "Key",
    "NearestMatchWarning",
    "Recommendation",
    "RecommendationMismatchError",
    "RecommendationNotFoundError",
    "TuneConfig",
    "load_recommendation",
    "save_recommendation",
    "tune",
]
