"""All public models, by name."""

from tests.strangers.public import (
    bonsai_language,
    bonsai_vision,
    generative,
    large_models,
    small_models,
)

PUBLIC = {
    **bonsai_vision.CASES,
    **bonsai_language.CASES,
    **large_models.CASES,
    **generative.CASES,
    **small_models.CASES,
}
