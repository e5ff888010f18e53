"""For the site: shows the version of the package at the bottom of every page."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the version to the footer."""
    package = Path(config.config_file_path).parent / "ringjax" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"$', package.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    config.copyright = f"ringjax {found[1]}"
    return config
