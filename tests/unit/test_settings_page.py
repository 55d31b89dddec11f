"""Tests that docs/policies.md has the settings of the code.

python -m tests.unit.test_settings_page         prints the entries as they have to be
"""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import pytest

from truenext.broker.config import describe_range, format_value
from truenext.broker.settings import BrokerSettings
from truenext.model.policy import Policy
from truenext.model.setting import Setting, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
SECTIONS = {"[policy]": Policy, "[broker]": BrokerSettings}


def entry(setting: Setting) -> str:
    """Return the entry that the page must have for a setting."""
    limits = describe_range(setting)
    facts = [f"default `{'nothing' if setting.kind is Path else format_value(setting, setting.default)}`"]
    facts += [setting.unit] if setting.unit else []
    facts += [limits] if limits else []
    facts += [f"needs a restart: {setting.fixed}" if setting.fixed else "reloaded"]
    paragraphs = [setting.meaning, f"*{'; '.join(facts)}.* {setting.reason}"]
    return "\n\n".join([f"### `{setting.name}`", *(fill(each, width=120) for each in paragraphs)]) + "\n"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_documents_every_setting_and_no_other(section: str) -> None:
    chapters = PAGE.read_text().split("\n## ")
    (chapter,) = (each for each in chapters if each.startswith(f"`{section}`"))
    settings = settings_of(SECTIONS[section])
    assert re.findall(r"^### `(.*)`$", chapter, re.MULTILINE) == list(settings)
    for setting in settings.values():
        assert entry(setting) in chapter + "\n"


@dataclass(frozen=True)
class Undescribed:
    size: int = 7


def test_a_setting_that_is_not_described_is_noticed() -> None:
    with pytest.raises(TypeError, match=r"Undescribed\.size is not described"):
        settings_of(Undescribed)


if __name__ == "__main__":
    for section, described in SECTIONS.items():
        print(f"## `{section}`\n")
        for setting in settings_of(described).values():
            print(entry(setting))
