"""The stages of seeds as they are shown: their colours and their meanings."""

from __future__ import annotations

STAGE_COLORS = {
    "GERMINATED": "#f0e442",
    "TRAINING": "#56b4e9",
    "BLENDING": "#e69f00",
    "HOLDING": "#cc79a7",
    "FOSSILIZED": "#40b58f",
    "PRUNED": "#d55e00",
    "EMBARGOED": "#bbbbbb",
    "RESETTING": "#e2e2e2",
}
"""For colour-blind readers, all light enough for black text."""
STAGE_WORDS = {
    "GERMINATED": "planted",
    "TRAINING": "training",
    "BLENDING": "blending",
    "HOLDING": "holding",
    "FOSSILIZED": "kept",
}
"""Stages in which a slot holds a seed, in a word."""
STAGE_MEANINGS = {
    "GERMINATED": "planted, not trained yet",
    "TRAINING": "incubated beside the host",
    "BLENDING": "its alpha is changing",
    "HOLDING": "fully blended, not kept yet",
    "FOSSILIZED": "kept for good",
    "PRUNED": "removed",
    "EMBARGOED": "the slot rests",
    "RESETTING": "the slot is almost free again",
}
"""Stages in which a slot is not free, in a few words."""
