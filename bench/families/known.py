"""All families by name."""

from __future__ import annotations

from bench.families import decoders, encoders, modules, pictures_and_text, sound, vision
from bench.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for part in (decoders, encoders, vision, pictures_and_text, sound, modules)
    for family in part.families()
}
